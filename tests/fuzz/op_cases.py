"""Random calls of store, gather and attend through the public functions, on any device and backend.

Pages lie between guard blocks, which must not change. Overwriting tokens that no query sees must not change a bit of
the result. Slots are in range or negative, as GPU kernels require; ``beyond`` adds slots beyond the pages, which CPU
backends refuse.
"""

from __future__ import annotations

import random
from collections import Counter

import torch
from torch import Tensor

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.codec.pack import page_tables
from slimkv.errors import InputError, SpecError, UnsupportedError
from slimkv.ops import AttendOptions, AttentionBatch, PackedKV
from slimkv.spec import Kind

GUARD, GUARD_BYTE, POISON = 2, 0xA5, 0xFF
SIDES = ("1", "2", "3", "4", "5", "6", "7", "8", "u2", "u4", "u8", "ur4", "fp8", "rawbf16", "rawfp16", "rawfp32")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Fuzzer:
    """Runs numbered cases; each depends on its number alone."""

    def __init__(
        self, device: torch.device, backends: tuple[str, ...], formats: tuple[str, ...] = (), beyond: bool = False,
        dims: tuple[int, ...] = (32, 64, 80, 128), blocks: tuple[int, ...] = (1, 16, 32, 64),
        gather_backends: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.device, self.backends, self.formats, self.beyond = device, backends, formats, beyond
        self.dims, self.blocks = dims, blocks
        self.gather_backends = gather_backends or backends
        self.calls: Counter[str] = Counter()

    def case(self, number: int) -> None:
        """Runs one case on every backend that supports it."""
        self.chance = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.layout = self._layout()
        self.codec = Codec(self.layout.spec, self.device)
        self.heads = self.chance.randint(1, 3)
        count = self.chance.randint(1, 1 + 64 // self.layout.block_size)
        shape = (count + 2 * GUARD, self.heads, self.layout.page_bytes)
        self.memory = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)
        self.memory[:GUARD] = self.memory[-GUARD:] = GUARD_BYTE
        self.memory = self.memory.to(self.device)
        self.pages = self.memory[GUARD:-GUARD]
        kind = self.chance.choice((self._store, self._gather, self._attend, self._attend))
        kind()
        for guard in (self.memory[:GUARD], self.memory[-GUARD:]):
            assert bool((guard == GUARD_BYTE).all()), "a guard block was written"

    def _layout(self) -> PageLayout:
        while True:
            side = [self.chance.choice(SIDES) for _ in range(2)]
            format = self.chance.choice(self.formats) if self.formats else f"k{side[0]}v{side[1]}"
            dim = self.chance.choice(self.dims)
            value_dim = dim if self.chance.random() < 0.8 else self.chance.choice(self.dims)
            try:
                return PageLayout(CodecSpec.parse(format, dim, value_dim), self.chance.choice(self.blocks))
            except SpecError:
                continue

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def _each(self, run, *arguments, backends=None):
        """The results of the backends that support the call."""
        out = {}
        for backend in backends or self.backends:
            try:
                out[backend] = run(backend, *arguments)
                self.calls[backend] += 1
            except UnsupportedError:
                continue
        return out

    def _slots(self, count: int) -> tuple[Tensor, bool]:
        """Distinct slots, some of them negative, and whether one is beyond the pages."""
        limit = self.pages.shape[0] * self.layout.block_size
        slots = self.chance.sample(range(limit), min(count, limit))
        slots = [-self.chance.randint(1, 9) if self.chance.random() < 0.15 else s for s in slots]
        bad = self.beyond and bool(slots) and self.chance.random() < 0.2
        if bad:
            slots[self.chance.randrange(len(slots))] = limit + self.chance.choice((0, 1, 1000, 2**20))
        dtype = self.chance.choice((torch.int32, torch.int64))
        return torch.tensor(slots, dtype=dtype).to(self.device), bad

    def _refused(self, call) -> None:
        before = self.memory.clone()
        for backend in self.backends:
            try:
                call(backend)
            except UnsupportedError:
                continue
            except InputError:
                assert torch.equal(self.memory, before), f"{backend}: a refused call wrote"
                self.calls[backend] += 1
                continue
            raise AssertionError(f"{backend}: what is out of range was not refused")

    def _store(self) -> None:
        slots, bad = self._slots(self.chance.randint(0, 20))
        spec = self.layout.spec
        dtype = self.chance.choice(DTYPES)
        sides = []
        for form, dim in ((spec.key, spec.key_dim), (spec.value, spec.value_dim)):
            mine = getattr(torch, form.raw_dtype) if form.kind == Kind.RAW else dtype
            sides.append(self._random(len(slots), self.heads, dim, dtype=mine))

        def store(backend):
            memory = self.memory.clone()
            ops.store_kv(*sides, PackedKV(memory[GUARD:-GUARD], self.codec, self.layout), slots, backend=backend)
            return memory

        if bad:
            self._refused(store)
            return
        results = self._each(store)
        changed = torch.zeros_like(self.memory, dtype=torch.bool)
        self._bytes_of(slots[slots >= 0].long(), changed, True)
        first = None
        for backend, memory in results.items():
            assert bool((changed | (memory == self.memory)).all()), f"{backend}: bytes of other tokens changed"
            first = memory if first is None else first
            assert torch.equal(memory, first), f"{backend} stores other bytes than {next(iter(results))}"

    def _bytes_of(self, slots: Tensor, target: Tensor, value) -> None:
        """Sets the bytes of ``slots`` in ``target``, which has the shape of the memory, to ``value``."""
        size = self.layout.block_size
        offsets = page_tables(self.layout, self.device).byte_offsets[slots % size]
        heads = torch.arange(self.heads, device=self.device)
        target[(slots // size + GUARD)[:, None, None], heads[None, :, None], offsets[:, None, :]] = value

    def _gather(self) -> None:
        slots, bad = self._slots(self.chance.randint(0, 30))

        def gather(backend):
            return ops.gather_kv(PackedKV(self.pages, self.codec, self.layout), slots, backend=backend)

        if bad:
            self._refused(gather)
            return
        for backend, pair in self._each(gather, backends=self.gather_backends).items():
            for x in pair:
                assert bool((x[slots < 0] == 0).all()), f"{backend}: a negative slot did not give zeros"

    def _attend(self) -> None:
        """Pages hold stored tokens, because random bytes would have magnitudes for which no sum is stable."""
        size, blocks = self.layout.block_size, self.pages.shape[0]
        self._fill()
        sequences = self.chance.randint(1, 3)
        width = self.chance.randint(1, 1 + 64 // size)
        lens = [self.chance.randint(0, width * size) for _ in range(sequences)]
        counts = [min(self.chance.choice((0, 1, 1, 1, 2, 5, 40)), max(length, 1)) for length in lens]
        table = torch.randint(0, blocks, (sequences, width), dtype=torch.int32, generator=self.generator)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        window = self.chance.choice((None, None, 1, 7, 33))
        heads, total, spec = self.heads * self.chance.choice((1, 2, 4)), sum(counts), self.layout.spec
        options = AttendOptions(
            sliding_window=window, softcap=self.chance.choice((0.0, 0.0, 20.0)),
            sinks=self._random(heads) if self.chance.random() < 0.2 else None,
        )  # fmt: skip
        query = self._random(total, heads, spec.key_dim, dtype=self.chance.choice(DTYPES))
        seen = self._seen(lens, counts, table, window)
        to = self.device

        def attend(backend, pages):
            lengths = torch.tensor(lens, dtype=torch.int32).to(to)
            batch = AttentionBatch(table.to(to), lengths, starts.to(to), max(counts), max(lens))
            return ops.attend(query, PackedKV(pages, self.codec, self.layout), batch, options, backend=backend)

        clean = self._each(attend, self.pages)
        poisoned = self.memory.clone()
        hidden = torch.tensor([i for i in range(blocks * size) if i not in seen], dtype=torch.int64, device=to)
        self._bytes_of(hidden, poisoned, POISON)
        for backend, out in self._each(attend, poisoned[GUARD:-GUARD]).items():
            assert torch.equal(out, clean[backend]), f"{backend}: tokens that no query sees changed the result"
        self._agree(clean)

    def _fill(self) -> None:
        spec, slots = self.layout.spec, torch.arange(self.pages.shape[0] * self.layout.block_size, device=self.device)
        sides = []
        for form, dim in ((spec.key, spec.key_dim), (spec.value, spec.value_dim)):
            dtype = getattr(torch, form.raw_dtype) if form.kind == Kind.RAW else torch.float32
            sides.append(self._random(len(slots), self.heads, dim, dtype=dtype))
        ops.store_kv(*sides, PackedKV(self.pages, self.codec, self.layout), slots)

    def _seen(self, lens, counts, table, window) -> set[int]:
        size, seen = self.layout.block_size, set()
        for sequence, (length, count) in enumerate(zip(lens, counts, strict=True)):
            if count == 0:
                continue
            first = 0 if window is None else max(length - count - window + 1, 0)
            for token in range(first, length):
                seen.add(int(table[sequence, token // size]) * size + token % size)
        return seen

    def _agree(self, results) -> None:
        """Backends agree as closely as half-precision products allow."""
        names = list(results)
        for name in names[1:]:
            one, other = results[names[0]].float(), results[name].float()
            assert bool(one.isfinite().all()), f"{names[0]} is not finite"
            assert bool(((one - other).abs() <= 0.03 * (1 + one.abs())).all()), f"{name} differs from {names[0]}"

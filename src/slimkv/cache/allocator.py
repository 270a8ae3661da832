"""Block ids and reference counts, without tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from slimkv.errors import InputError, OutOfPagesError


class BlockAllocator:
    """Allocates blocks 0..count-1. A block may be shared; it is free when its last owner releases it."""

    def __init__(self, count: int) -> None:
        if count < 0:
            raise InputError(f"a pool cannot have {count} blocks; use 0 or more")
        self.count = count
        self._free = deque(range(count))
        self._references = [0] * count

    @property
    def free_blocks(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def references(self, block: int) -> int:
        """The number of owners of ``block``."""
        return self._references[self._known(block)]

    def allocate(self, count: int = 1) -> list[int]:
        """``count`` new blocks with one owner each; raises ``OutOfPagesError`` and allocates none if fewer are free."""
        if count < 0:
            raise InputError(f"cannot allocate {count} blocks; use 0 or more")
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} blocks requested, {len(self._free)} of {self.count} are free; "
                "free a sequence or use a larger pool"
            )
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to each block."""
        for block in self._owned(blocks):
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Removes an owner from each block."""
        owned = Counter(self._owned(blocks))
        for block, times in owned.items():
            if times > self._references[block]:
                raise InputError(
                    f"block {block} has {self._references[block]} owners; it cannot be freed {times} times"
                )
        for block, times in owned.items():
            self._references[block] -= times
            if self._references[block] == 0:
                self._free.append(block)

    def grow(self, count: int) -> None:
        """Adds blocks until there are ``count``."""
        if count < self.count:
            raise InputError(f"a pool of {self.count} blocks cannot shrink to {count}")
        self._free.extend(range(self.count, count))
        self._references.extend([0] * (count - self.count))
        self.count = count

    def writable(self, block: int) -> tuple[int, bool]:
        """A block that its owner may write to: ``block`` itself, or a new one if it has several owners.

        Returns the block and whether the caller must copy the old block's bytes into it.
        """
        if self._references[self._owned([block])[0]] == 1:
            return block, False
        fresh = self.allocate()[0]
        self._references[block] -= 1
        return fresh, True

    def _known(self, block: int) -> int:
        if not 0 <= block < self.count:
            raise InputError(f"block {block} is not one of this pool's {self.count} blocks")
        return block

    def _owned(self, blocks: Iterable[int]) -> list[int]:
        blocks = list(blocks)
        for block in blocks:
            if self._references[self._known(block)] == 0:
                raise InputError(f"block {block} is free; it cannot be shared, written or freed")
        return blocks

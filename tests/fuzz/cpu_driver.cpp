// Random calls of the compiled CPU kernels, in a separate process and usually under sanitizers.
//
//   cpu_driver LAYOUTS FIRST COUNT [THREADS]
//
// LAYOUTS is a file of tables that tests/fuzz/cpu_driver.py writes. Case i depends on i alone: `cpu_driver LAYOUTS i 1`
// repeats a failure. Every buffer has exactly the bytes that the call may touch, so that the address sanitizer reports
// the first byte outside. Page strides are padded, and the bytes between pages must not change.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <algorithm>
#include <string>

#include "slimkv_cpu.cpp"

struct Random {
  u64 state;
  explicit Random(u64 seed) : state(seed * 0x9E3779B97F4A7C15ull + 0x1234567) {
    for (int i = 0; i < 4; i++) next();
  }
  u64 next() {  // splitmix64
    u64 z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  i64 below(i64 n) { return (i64)(next() % (u64)n); }
  i64 range(i64 low, i64 high) { return low + below(high - low + 1); }
  bool chance(double p) { return (double)(next() >> 11) * 0x1p-53 < p; }
  float number() {  // mean 0, variance 1; the sum of two uniform numbers is close enough to a normal one here
    const u64 x = next();
    return ((float)(u32)x * 0x1p-32f + (float)(x >> 32) * 0x1p-32f - 1.0f) * 2.4494897f;
  }
};

static i64 current_case = -1;

[[noreturn]] static void fail(const std::string& text) {
  printf("case %lld: %s\n", (long long)current_case, text.c_str());
  exit(1);
}

static void require(bool held, const char* text) {
  if (!held) fail(text);
}

// A buffer of exactly `bytes`, with redzones around it under the address sanitizer.
struct Buffer {
  std::unique_ptr<u8, void (*)(void*)> data{nullptr, free};
  size_t bytes = 0;
  explicit Buffer(size_t n) : data((u8*)malloc(n ? n : 1), free), bytes(n) {}
  Buffer copy() const {
    Buffer other(bytes);
    memcpy(other.data.get(), data.get(), bytes);
    return other;
  }
  bool operator==(const Buffer& other) const {
    return bytes == other.bytes && !memcmp(data.get(), other.data.get(), bytes);
  }
};

constexpr int SAMPLES = 4;

struct LoadedLayout {
  Layout layout;
  std::vector<Buffer> tables;
  Buffer samples{0};  // pages full of tokens
};

static std::vector<LoadedLayout> load_layouts(const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) fail(std::string("cannot open ") + path);
  auto word = [&]() {
    u32 x;
    if (fread(&x, 4, 1, file) != 1) fail("the layouts' file is too short");
    return x;
  };
  std::vector<LoadedLayout> out(word());
  for (LoadedLayout& loaded : out) {
    if (word() != sizeof(Layout) || fread(&loaded.layout, sizeof(Layout), 1, file) != 1)
      fail("Layout has another size");
    for (u32 i = word(); i > 0; i--) {
      const u32 offset = word();
      loaded.tables.emplace_back(word());
      Buffer& table = loaded.tables.back();
      if (table.bytes && fread(table.data.get(), table.bytes, 1, file) != 1) fail("a table is too short");
      void* pointer = table.data.get();
      memcpy((u8*)&loaded.layout + offset, &pointer, sizeof pointer);
    }
  }
  fclose(file);
  return out;
}

// Pages with padded strides.
struct Pool {
  Pages pages;
  Buffer memory{0};
  const Layout* layout;

  // One pool in a hundred has six blocks, whatever their size.
  Pool(Random& r, const Layout& of, const Buffer& samples, bool sane)
      : Pool(r, of, r.range(1, 3), r.chance(0.01) ? 6 : r.range(1, 1 + 48 / of.block_size)) {
    const size_t size = (size_t)of.page_bytes;
    if (sane)
      for (i64 b = 0; b < pages.blocks; b++)
        for (i64 h = 0; h < pages.heads; h++)
          memcpy(pages.data + b * pages.block_stride + h * pages.head_stride,
              samples.data.get() + size * (size_t)r.below(SAMPLES), size);
    else randomise(r);
  }
  Pool(Random& r, const Layout& of, i64 heads, i64 blocks) : layout(&of) {
    pages.heads = (i32)heads;
    pages.blocks = blocks;
    pages.head_stride = of.page_bytes + 16 * r.below(3);
    pages.block_stride = pages.heads * pages.head_stride + 16 * r.below(3);
    memory = Buffer(
        (size_t)((pages.blocks - 1) * pages.block_stride + (pages.heads - 1) * pages.head_stride + of.page_bytes));
    pages.data = memory.data.get();
    pages.padding = 0;
  }
  i64 slots() const { return pages.blocks * layout->block_size; }
  u8* page(i64 slot, i64 head) const {
    return pages.data + slot / layout->block_size * pages.block_stride + head * pages.head_stride;
  }
  const i32* offsets(i64 slot) const { return layout->byte_offsets + slot % layout->block_size * layout->row_bytes; }
  // Overwrites every byte of a token.
  void fill(i64 slot, u8 byte) {
    for (i64 head = 0; head < pages.heads; head++)
      for (int i = 0; i < layout->row_bytes; i++) page(slot, head)[offsets(slot)[i]] = byte;
  }
  void randomise(Random& r) {
    size_t i = 0;
    for (; i + 8 <= memory.bytes; i += 8) {
      const u64 x = r.next();
      memcpy(pages.data + i, &x, 8);
    }
    for (; i < memory.bytes; i++) pages.data[i] = (u8)r.next();
  }
};

// [tokens, heads, dim] with padded strides.
struct Matrix {
  Vectors vectors;
  Buffer memory{0};
  i64 tokens, heads;
  int dim;

  Matrix(Random& r, i64 tokens_, i64 heads_, int dim_, i32 dtype) : tokens(tokens_), heads(heads_), dim(dim_) {
    const i64 size = dtype == F32 ? 4 : 2;
    vectors.head_stride = dim + r.below(3);
    vectors.token_stride = heads * vectors.head_stride + r.below(3);
    vectors.dtype = dtype;
    vectors.padding = 0;
    const i64 count =
        tokens && heads ? (tokens - 1) * vectors.token_stride + (heads - 1) * vectors.head_stride + dim : 0;
    memory = Buffer((size_t)(count * size));
    memset(memory.data.get(), 0xA5, memory.bytes);
    vectors.data = memory.data.get();
  }
  void set(i64 token, i64 head, const float* x) { store_row(vectors, token, head, dim, x); }
  void get(i64 token, i64 head, float* x) const { load_row(vectors, token, head, dim, x); }
  // Ordinary numbers; with `special` also zeros, subnormals, huge numbers, infinities and NaN.
  void fill(Random& r, bool special) {
    std::vector<float> x((size_t)dim);
    for (i64 t = 0; t < tokens; t++)
      for (i64 h = 0; h < heads; h++) {
        const float scale = special && r.chance(0.3) ? powf(2.0f, (float)r.range(-140, 120)) : 1.0f;
        for (float& v : x) v = r.number() * scale;
        if (special && r.chance(0.1)) std::fill(x.begin(), x.end(), 0.0f);
        if (special && r.chance(0.2)) {
          const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 1e-42f, 3.4e38f, -65504.0f};
          x[(size_t)r.below(dim)] = odd[r.below(7)];
        }
        set(t, h, x.data());
      }
  }
};

static i32 dtype_for(Random& r, const Side& side) { return side.kind == RAW ? side.raw_dtype : (i32)r.below(3); }

static std::vector<u8> slot_bytes(const std::vector<i64>& slots, bool wide) {
  std::vector<u8> out(slots.size() * (wide ? 8 : 4));
  for (size_t i = 0; i < slots.size(); i++) {
    const i32 narrow = (i32)slots[i];
    memcpy(out.data() + i * (wide ? 8 : 4), wide ? (const void*)&slots[i] : (const void*)&narrow, wide ? 8 : 4);
  }
  return out;
}

// Slots of a call: in range, negative and, with `bad`, one beyond the pages. Stores by several threads need `distinct`.
static std::vector<i64> random_slots(Random& r, i64 tokens, i64 limit, bool wide, bool distinct, bool bad) {
  std::vector<i64> out((size_t)tokens), order((size_t)limit);
  for (i64 i = 0; i < limit; i++) order[(size_t)i] = i;
  for (i64 i = 0; i < tokens; i++) {
    i64 slot = r.below(limit);
    if (distinct) {
      const i64 j = i < limit ? r.range(i, limit - 1) : 0;
      if (i < limit) std::swap(order[(size_t)i], order[(size_t)j]);
      slot = i < limit ? order[(size_t)i] : -1;
    }
    if (r.chance(0.15))
      slot = r.chance(0.5) ? -1 : wide ? -(i64)(r.next() >> 1) - 1 : -(i64)(r.next() & 0x7FFFFFFF) - 1;
    out[(size_t)i] = slot;
  }
  if (bad && tokens) {
    const i64 far = wide ? (i64)(r.next() >> 1) : (i64)(r.next() & 0x7FFFFFFF);
    out[(size_t)r.below(tokens)] = r.chance(0.4) ? limit : std::max(far, limit);
  }
  return out;
}

static bool beyond(const std::vector<i64>& slots, i64 limit) {
  for (i64 s : slots)
    if (s >= limit) return true;
  return false;
}

static i32 call_store(const Pool& pool, const Matrix& key, const Matrix& value, const std::vector<i64>& slots,
    bool wide, int threads, const i8* matrices = nullptr, const i32* index = nullptr, i64 count = 1) {
  Buffer held(slots.size() * (wide ? 8 : 4));
  const std::vector<u8> bytes = slot_bytes(slots, wide);
  if (held.bytes) memcpy(held.data.get(), bytes.data(), held.bytes);
  TokensCall call{pool.layout, pool.pages, key.vectors, value.vectors, held.data.get(), (i64)slots.size(), wide,
      threads, matrices, index, count, 0, 0, {}};
  return slimkv_store(&call);
}

static i32 call_gather(const Pool& pool, Matrix& key, Matrix& value, const std::vector<i64>& slots, bool wide,
    bool rotated, int threads) {
  Buffer held(slots.size() * (wide ? 8 : 4));
  const std::vector<u8> bytes = slot_bytes(slots, wide);
  if (held.bytes) memcpy(held.data.get(), bytes.data(), held.bytes);
  TokensCall call{pool.layout, pool.pages, key.vectors, value.vectors, held.data.get(), (i64)slots.size(), wide,
      threads, nullptr, nullptr, 1, rotated, 0, {}};
  return slimkv_gather(&call);
}

// Makes pages of stored tokens, once per layout. Most cases begin with copies of them.
static void make_samples(LoadedLayout& loaded) {
  const Layout& layout = loaded.layout;
  Random r(7);
  Pool pool(r, layout, 1, SAMPLES);
  pool.pages.block_stride = layout.page_bytes;
  loaded.samples = Buffer((size_t)(SAMPLES * layout.page_bytes));
  memset(loaded.samples.data.get(), 0, loaded.samples.bytes);
  pool.pages.data = loaded.samples.data.get();
  Matrix key(r, pool.slots(), 1, layout.key.dim, dtype_for(r, layout.key)),
      value(r, pool.slots(), 1, layout.value.dim, dtype_for(r, layout.value));
  key.fill(r, false);
  value.fill(r, false);
  std::vector<i64> slots((size_t)pool.slots());
  for (size_t i = 0; i < slots.size(); i++) slots[i] = (i64)i;
  require(call_store(pool, key, value, slots, true, 1) == OK, "storing to every slot was refused");
}

static void fuzz_store(Random& r, const LoadedLayout& loaded, int threads) {
  const Layout& layout = loaded.layout;
  Pool pool(r, layout, loaded.samples, false);
  const bool wide = r.chance(0.5), distinct = threads > 1 || r.chance(0.7);
  const i64 tokens = r.range(0, r.chance(0.1) ? 24 : 6);
  const std::vector<i64> slots = random_slots(r, tokens, pool.slots(), wide, distinct, r.chance(0.15));
  Matrix key(r, tokens, pool.pages.heads, layout.key.dim, dtype_for(r, layout.key));
  Matrix value(r, tokens, pool.pages.heads, layout.value.dim, dtype_for(r, layout.value));
  key.fill(r, true);
  value.fill(r, true);
  // Query-aware rounding with one to three matrices and any index: the kernel clamps it to the first and the last.
  const i64 count = r.range(1, 3), dim = layout.key.dim;
  const bool aware = layout.key.kind == LLOYD && r.chance(0.3);
  Buffer matrices((size_t)(aware ? count * pool.pages.heads * dim * dim : 0)), index((size_t)(aware ? 4 * tokens : 0));
  for (size_t i = 0; i < matrices.bytes; i++) matrices.data.get()[i] = (u8)r.next();
  for (i64 i = 0; aware && i < tokens; i++)
    ((i32*)index.data.get())[i] = r.chance(0.5) ? (i32)r.below(count) : (i32)r.next();
  const Buffer before = pool.memory.copy();
  const i32 status =
      call_store(pool, key, value, slots, wide, threads, aware ? (const i8*)matrices.data.get() : nullptr,
          aware && r.chance(0.8) ? (const i32*)index.data.get() : nullptr, count);
  if (beyond(slots, pool.slots())) {
    require(status == BAD_SLOT, "a slot beyond the pages was not refused");
    require(pool.memory == before, "a refused store wrote");
    return;
  }
  require(status == OK, "a store in range was refused");
  // Only bytes of the given slots may differ.
  std::vector<u8> may(pool.memory.bytes, 0);
  for (i64 slot : slots)
    for (i64 head = 0; slot >= 0 && head < pool.pages.heads; head++)
      for (int i = 0; i < layout.row_bytes; i++)
        may[(size_t)(pool.page(slot, head) + pool.offsets(slot)[i] - pool.pages.data)] = 1;
  for (size_t i = 0; i < may.size(); i++)
    require(may[i] || pool.pages.data[i] == before.data.get()[i], "a store wrote to bytes of other tokens");
  // Finite vectors are stored and those with NaN or Inf are marked, which affects no other vector.
  if (!distinct) return;
  Matrix out_key(r, tokens, pool.pages.heads, layout.key.dim, F32),
      out_value(r, tokens, pool.pages.heads, layout.value.dim, F32);
  require(call_gather(pool, out_key, out_value, slots, wide, false, 1) == OK, "a gather in range was refused");
  std::vector<float> given(MAX_DIM), found(MAX_DIM);
  for (i64 t = 0; t < tokens; t++)
    for (i64 h = 0; h < pool.pages.heads; h++)
      for (int side = 0; side < 2; side++) {
        const Side& of = side ? layout.value : layout.key;
        (side ? value : key).get(t, h, given.data());
        (side ? out_value : out_key).get(t, h, found.data());
        bool finite = true, marked = false;
        float largest = 0;
        for (int d = 0; d < of.dim; d++) {
          finite &= std::isfinite(given[(size_t)d]);
          largest = std::max(largest, fabsf(given[(size_t)d]));
          marked |= !std::isfinite(found[(size_t)d]);
        }
        if (slots[(size_t)t] < 0) {
          for (int d = 0; d < of.dim; d++) require(found[(size_t)d] == 0, "a negative slot did not give zeros");
        } else if (of.kind == RAW) {
          require(!memcmp(given.data(), found.data(), sizeof(float) * (size_t)of.dim) || !finite,
              "raw pages changed a number");
        } else if (!finite) {
          require(marked, "a vector with NaN or Inf was stored as if it were finite");
        } else if (largest < 1e4f) {
          require(!marked, "a finite vector of ordinary size was not stored");
        }
      }
}

static void fuzz_gather(Random& r, const LoadedLayout& loaded, int threads) {
  const Layout& layout = loaded.layout;
  Pool pool(r, layout, loaded.samples, r.chance(0.5));
  const bool wide = r.chance(0.5);
  const i64 tokens = r.range(0, r.chance(0.1) ? 40 : 8);
  const std::vector<i64> slots = random_slots(r, tokens, pool.slots(), wide, false, r.chance(0.15));
  Matrix key(r, tokens, pool.pages.heads, layout.key.dim, (i32)r.below(3)),
      value(r, tokens, pool.pages.heads, layout.value.dim, (i32)r.below(3));
  const Buffer before = pool.memory.copy(), key_before = key.memory.copy(), value_before = value.memory.copy();
  const i32 status = call_gather(pool, key, value, slots, wide, r.chance(0.5), threads);
  require(pool.memory == before, "a gather wrote to the pages");
  if (beyond(slots, pool.slots())) {
    require(status == BAD_SLOT, "a slot beyond the pages was not refused");
    require(key.memory == key_before && value.memory == value_before, "a refused gather wrote");
    return;
  }
  require(status == OK, "a gather in range was refused");
  std::vector<float> x(MAX_DIM);
  for (i64 t = 0; t < tokens; t++)
    for (i64 h = 0; h < pool.pages.heads && slots[(size_t)t] < 0; h++) {
      key.get(t, h, x.data());
      for (int d = 0; d < layout.key.dim; d++) require(x[(size_t)d] == 0, "a negative slot did not give zeros");
    }
}

// One random call of attention.
struct AttendCase {
  Random& r;
  const Layout& layout;
  Pool pool;
  i64 sequences, width, total = 0, heads;
  std::vector<i32> lens, starts, table;
  std::unique_ptr<Matrix> query, fresh_key, fresh_value;
  Buffer sinks{0};
  AttendCall call{};
  const bool sane;  // ordinary pages and queries, for which a plain sum gives the same attention

  AttendCase(Random& random, const LoadedLayout& loaded, bool sane_)
      : r(random), layout(loaded.layout), pool(random, loaded.layout, loaded.samples, sane_), sane(sane_) {
    const bool large = r.chance(0.02);
    sequences = r.range(0, large ? 5 : 3);
    width = r.range(1, 1 + (large ? 160 : 48) / layout.block_size);
    if (r.chance(0.005)) width = 600 / layout.block_size + 2;  // long enough to be split
    heads = pool.pages.heads * r.range(1, r.chance(0.1) ? 5 : 2);
    starts.push_back(0);
    for (i64 i = 0; i < sequences; i++) {
      const i64 most = width * layout.block_size;
      lens.push_back((i32)(r.chance(0.1) ? 0 : r.chance(0.1) ? most : r.range(1, most)));
      const i64 asked = r.chance(0.6) ? 1 : large ? r.range(0, 70) : r.range(0, 6);
      starts.push_back(starts.back() + (i32)asked);
      for (i64 j = 0; j < width; j++) table.push_back((i32)r.below(pool.pages.blocks));
    }
    total = starts.back() + (r.chance(0.1) ? r.range(1, 3) : 0);  // rows beyond the last start stay untouched
    query.reset(new Matrix(r, total, heads, layout.key.dim, (i32)r.below(3)));
    query->fill(r, !sane && r.chance(0.3));
    call.layout = &layout;
    call.pages = pool.pages;
    call.heads = (i32)heads;
    call.causal = r.chance(0.8);
    if (call.causal && r.chance(0.4)) call.window = r.chance(0.1) ? (i64)1 << 40 : r.range(1, 40);
    call.softmax_scale = 1.0f / sqrtf((float)layout.key.dim);
    call.softcap = r.chance(0.2) ? (float)r.range(1, 50) : 0.0f;
    if (r.chance(0.25)) {
      fresh_key.reset(new Matrix(r, total, pool.pages.heads, layout.key.dim, (i32)r.below(3)));
      fresh_value.reset(new Matrix(r, total, pool.pages.heads, layout.value.dim, (i32)r.below(3)));
      fresh_key->fill(r, false);
      fresh_value->fill(r, false);
      call.fresh_key = fresh_key->vectors;
      call.fresh_value = fresh_value->vectors;
    }
    if (r.chance(0.2)) {
      sinks = Buffer(sizeof(float) * (size_t)heads);
      for (i64 h = 0; h < heads; h++) ((float*)sinks.data.get())[h] = r.number() * 3;
      call.sinks = (const float*)sinks.data.get();
    }
  }
  i64 queries(i64 s) const { return starts[(size_t)s + 1] - starts[(size_t)s]; }
  i64 position(i64 s, i64 q) const { return lens[(size_t)s] - queries(s) + q; }
  i64 sees_from(i64 s, i64 q) const { return call.window ? std::max<i64>(position(s, q) - call.window + 1, 0) : 0; }
  i64 sees_to(i64 s, i64 q) const { return call.causal ? std::max<i64>(position(s, q) + 1, 0) : lens[(size_t)s]; }
  i64 fresh_from(i64 s) const { return fresh_key ? std::max<i64>(lens[(size_t)s] - queries(s), 0) : lens[(size_t)s]; }
  i64 slot(i64 s, i64 token) const {
    return (i64)table[(size_t)(s * width + token / layout.block_size)] * layout.block_size + token % layout.block_size;
  }

  // Overwrites table entries that no query needs.
  void spoil_table() {
    for (i64 s = 0; s < sequences; s++) {
      i64 first = width, last = -1;
      for (i64 q = 0; q < queries(s); q++)
        for (i64 t = sees_from(s, q); t < std::min(sees_to(s, q), fresh_from(s)); t++) {
          first = std::min(first, t / layout.block_size);
          last = std::max(last, t / layout.block_size);
        }
      const i64 reach = lens[(size_t)s] - 1 >= 0 ? (fresh_from(s) - 1) / layout.block_size : -1;
      // The first query's own token counts as needed, even if it is not read from the pages.
      first = call.window ? std::min(first, std::max<i64>(position(s, 0), 0) / layout.block_size) : 0;
      for (i64 j = 0; j < width; j++)
        if (queries(s) == 0 || j < first || j > std::max(last, fresh_from(s) > 0 ? reach : -1))
          table[(size_t)(s * width + j)] = r.chance(0.5) ? (i32)r.next() : -1;
    }
  }
  // Overwrites the tokens that no query sees.
  void poison(Pool& copy) {
    std::vector<u8> seen((size_t)pool.slots(), 0);
    for (i64 s = 0; s < sequences; s++)
      for (i64 q = 0; q < queries(s); q++)
        for (i64 t = sees_from(s, q); t < std::min(sees_to(s, q), fresh_from(s)); t++) seen[(size_t)slot(s, t)] = 1;
    for (i64 i = 0; i < pool.slots(); i++)
      if (!seen[(size_t)i]) copy.fill(i, 0xFF);
  }
  i32 run(Matrix& out, Buffer& lse, int threads) {
    Buffer held_table(4 * table.size()), held_lens(4 * lens.size()), held_starts(4 * starts.size());
    if (table.size()) memcpy(held_table.data.get(), table.data(), held_table.bytes);
    if (lens.size()) memcpy(held_lens.data.get(), lens.data(), held_lens.bytes);
    memcpy(held_starts.data.get(), starts.data(), held_starts.bytes);
    call.block_table = (const i32*)held_table.data.get();
    call.table_stride = call.table_width = width;
    call.seq_lens = (const i32*)held_lens.data.get();
    call.cu_seqlens_q = (const i32*)held_starts.data.get();
    call.sequences = sequences;
    call.total_queries = total;
    call.query = query->vectors;
    call.out = out.vectors;
    call.lse = lse.bytes ? (float*)lse.data.get() : nullptr;
    call.threads = threads;
    return slimkv_attend(&call);
  }
};

// Computes one row in double precision from gathered keys and values. The tolerance is relative to the largest value.
static void check_row(AttendCase& c, Matrix& key, Matrix& value, const std::vector<i64>& first, i64 s, i64 q, i64 head,
    const Matrix& out, const Buffer& lse) {
  const int key_dim = c.layout.key.dim, value_dim = c.layout.value.dim;
  const i64 group = c.heads / c.pool.pages.heads, kv = head / group, row = c.starts[(size_t)s] + q;
  std::vector<float> x((size_t)key_dim), k((size_t)key_dim), v((size_t)value_dim), found((size_t)value_dim);
  c.query->get(row, head, x.data());
  std::vector<double> scores, sum((size_t)value_dim, 0.0);
  const i64 from = c.sees_from(s, q), to = c.sees_to(s, q),
            offset = c.starts[(size_t)s] + c.queries(s) - c.lens[(size_t)s];
  double greatest = c.call.sinks ? c.call.sinks[head] : -INFINITY, total = 0, largest = 0;
  for (i64 t = from; t < to; t++) {
    if (t < c.fresh_from(s)) key.get(first[(size_t)s] + t, kv, k.data());
    else c.fresh_key->get(offset + t, kv, k.data());
    double dot = 0;
    for (int d = 0; d < key_dim; d++) dot += (double)x[(size_t)d] * k[(size_t)d];
    dot *= c.call.softmax_scale;
    if (c.call.softcap > 0) dot = c.call.softcap * tanh(dot / c.call.softcap);
    scores.push_back(dot);
    greatest = std::max(greatest, dot);
  }
  if (c.call.sinks) total += exp(c.call.sinks[head] - greatest);
  for (i64 t = from; t < to; t++) {
    if (t < c.fresh_from(s)) value.get(first[(size_t)s] + t, kv, v.data());
    else c.fresh_value->get(offset + t, kv, v.data());
    const double weight = exp(scores[(size_t)(t - from)] - greatest);
    total += weight;
    for (int d = 0; d < value_dim; d++) {
      sum[(size_t)d] += weight * v[(size_t)d];
      largest = std::max(largest, fabs((double)v[(size_t)d]));
    }
  }
  out.get(row, head, found.data());
  const double rounding = out.vectors.dtype == F32 ? 2e-5 : out.vectors.dtype == F16 ? 2e-3 : 1e-2;
  for (int d = 0; d < value_dim; d++) {
    const double wanted = total == 0 ? 0 : sum[(size_t)d] / total;
    if (!(fabs(found[(size_t)d] - wanted) <= rounding * std::max(largest, 1.0)))
      fail("attention is wrong: " + std::to_string(found[(size_t)d]) + " for " + std::to_string(wanted) +
          " at dimension " + std::to_string(d));
  }
  if (lse.bytes) {
    const float given = ((const float*)lse.data.get())[row * c.heads + head];
    const double wanted = total == 0 ? -INFINITY : greatest + log(total);
    require(given == wanted || fabs(given - wanted) <= 1e-4 * std::max(1.0, fabs(wanted)), "the log-sum-exp is wrong");
  }
}

static void check_values(AttendCase& c, const Matrix& out, const Buffer& lse) {
  std::vector<i64> first, slots;
  for (i64 s = 0; s < c.sequences; s++) {
    first.push_back((i64)slots.size());
    for (i64 t = 0; t < c.lens[(size_t)s]; t++) {
      const i64 at = c.slot(s, t);
      slots.push_back(at >= 0 && at < c.pool.slots() ? at : -1);  // an overwritten entry that no query needs
    }
  }
  Matrix key(c.r, (i64)slots.size(), c.pool.pages.heads, c.layout.key.dim, F32),
      value(c.r, (i64)slots.size(), c.pool.pages.heads, c.layout.value.dim, F32);
  require(call_gather(c.pool, key, value, slots, true, false, 1) == OK, "a gather in range was refused");
  for (i64 s = 0; s < c.sequences; s++) {
    if (c.queries(s) == 0) continue;
    const i64 q = c.r.below(c.queries(s));
    check_row(c, key, value, first, s, q, c.r.below(c.heads), out, lse);
  }
}

// A token that is marked invalid gives NaN in the rows that see it, and changes no bit of the others.
static void check_isolation(AttendCase& c, const Matrix& out, int threads) {
  const i64 s = c.r.below(c.sequences);
  if (c.fresh_from(s) < 1 || c.queries(s) == 0) return;
  const i64 token = c.r.below(c.fresh_from(s)), bad = c.slot(s, token);
  if (bad < 0 || bad >= c.pool.slots()) return;
  const Buffer before = c.pool.memory.copy();
  c.pool.fill(bad, 0xFF);
  Matrix other(c.r, c.total, c.heads, c.layout.value.dim, out.vectors.dtype);
  Buffer none(0);
  require(c.run(other, none, threads) == OK, "the same call was refused");
  std::vector<float> a(MAX_DIM), b(MAX_DIM);
  for (i64 i = 0; i < c.sequences; i++)
    for (i64 q = 0; q < c.queries(i); q++) {
      bool sees = false;
      for (i64 t = c.sees_from(i, q); t < std::min(c.sees_to(i, q), c.fresh_from(i)) && !sees; t++)
        sees = c.slot(i, t) == bad;
      for (i64 h = 0; h < c.heads; h++) {
        out.get(c.starts[(size_t)i] + q, h, a.data());
        other.get(c.starts[(size_t)i] + q, h, b.data());
        if (sees) {
          require(std::isnan(b[0]), "a token that could not be stored was attended as if it could");
        } else {
          for (int d = 0; d < c.layout.value.dim; d++)
            require(a[(size_t)d] == b[(size_t)d] || (std::isnan(a[(size_t)d]) && std::isnan(b[(size_t)d])),
                "a NaN reached a query that does not see its token");
        }
      }
    }
  memcpy(c.pool.memory.data.get(), before.data.get(), before.bytes);
}

static void fuzz_attend(Random& r, const LoadedLayout& loaded, int threads) {
  const Layout& layout = loaded.layout;
  AttendCase c(r, loaded, r.chance(0.6));
  c.spoil_table();
  Matrix out(r, c.total, c.heads, layout.value.dim, (i32)r.below(3));
  Buffer lse(r.chance(0.5) ? sizeof(float) * (size_t)(c.total * c.heads) : 0);
  if (lse.bytes) memset(lse.data.get(), 0xA5, lse.bytes);
  if (r.chance(0.15) && c.sequences) {  // something that a query needs is out of range
    const i64 s = r.below(c.sequences);
    const int what = (int)r.below(4);
    i32 wanted = OK;
    bool seen = false;  // whether a query sees the last token of the pages
    for (i64 q = 0; q < c.queries(s); q++)
      seen |= c.sees_from(s, q) < c.fresh_from(s) && c.sees_to(s, q) >= c.fresh_from(s);
    if (what == 0 && seen && c.fresh_from(s) > 0) {
      const i64 last = (c.fresh_from(s) - 1) / layout.block_size;
      c.table[(size_t)(s * c.width + last)] = r.chance(0.5) ? (i32)c.pool.pages.blocks
          : r.chance(0.5)                                   ? -1
                                                            : (i32)(r.next() | 0x80000000u);
      wanted = BAD_BLOCK;
    } else if (what == 1 && c.queries(s)) {
      c.lens[(size_t)s] = r.chance(0.5)
          ? -1 - (i32)r.below(1000)
          : (i32)std::min<i64>(c.width * layout.block_size + 1 + r.below(1 << 20), 0x7FFFFFFF);
      wanted = BAD_LENGTH;
    } else if (what == 2) {
      c.starts[(size_t)s + 1] = r.chance(0.5) ? (i32)(c.total + 1 + r.below(1 << 20)) : -1 - (i32)r.below(100);
      wanted = BAD_QUERY_START;
    } else if (what == 3) {
      c.starts[0] = -1 - (i32)r.below(100);
      wanted = BAD_QUERY_START;
    }
    const Buffer before = out.memory.copy(), lse_before = lse.copy();
    const i32 status = c.run(out, lse, threads);
    if (wanted == OK) return;
    require(status != OK, "a table out of range was not refused");
    require(status == wanted || c.sequences > 1, "a table out of range was refused for another reason");
    require(out.memory == before && lse == lse_before, "a refused attend wrote");
    return;
  }
  const Buffer before = c.pool.memory.copy();
  const i32 status = c.run(out, lse, threads);
  require(status == OK, "an attend in range was refused");
  require(c.pool.memory == before, "attend wrote to the pages");
  std::vector<float> x(MAX_DIM);
  // Rows that belong to no sequence are unchanged.
  for (i64 q = c.starts.back(); q < c.total; q++)
    for (i64 h = 0; h < c.heads; h++) {
      const u8* bytes = (const u8*)out.vectors.data +
          (q * out.vectors.token_stride + h * out.vectors.head_stride) * (out.vectors.dtype == F32 ? 4 : 2);
      for (int i = 0; i < layout.value.dim * (out.vectors.dtype == F32 ? 4 : 2); i++)
        require(bytes[i] == 0xA5, "attend wrote to a row of no sequence");
    }
  if (c.sane) check_values(c, out, lse);
  // Tokens that no query sees do not change a bit of the result.
  c.poison(c.pool);
  Matrix again(r, c.total, c.heads, layout.value.dim, out.vectors.dtype);
  Buffer none(0);
  require(c.run(again, none, threads) == OK, "the same call was refused");
  std::vector<float> a(MAX_DIM), b(MAX_DIM);
  for (i64 q = 0; q < c.starts.back(); q++)
    for (i64 h = 0; h < c.heads; h++) {
      out.get(q, h, a.data());
      again.get(q, h, b.data());
      for (int d = 0; d < layout.value.dim; d++)
        require(a[(size_t)d] == b[(size_t)d] || (std::isnan(a[(size_t)d]) && std::isnan(b[(size_t)d])),
            "bytes that no query sees changed the result");
    }
  if (c.sequences && r.chance(0.3)) check_isolation(c, again, threads);
}

int main(int argc, char** argv) {
  if (argc < 4) {
    printf("usage: cpu_driver LAYOUTS FIRST COUNT [THREADS]\n");
    return 2;
  }
  std::vector<LoadedLayout> layouts = load_layouts(argv[1]);
  for (LoadedLayout& loaded : layouts) make_samples(loaded);
  const i64 first = atoll(argv[2]), count = atoll(argv[3]);
  const int threads = argc > 4 ? atoi(argv[4]) : 1;
  i64 stores = 0, gathers = 0, attends = 0;
  for (current_case = first; current_case < first + count; current_case++) {
    Random r((u64)current_case);
    const LoadedLayout& layout = layouts[(size_t)r.below((i64)layouts.size())];
    const i64 kind = r.below(10);
    if (kind < 3) fuzz_store(r, layout, threads), stores++;
    else if (kind < 5) fuzz_gather(r, layout, threads), gathers++;
    else fuzz_attend(r, layout, threads), attends++;
  }
  printf("ok store %lld gather %lld attend %lld\n", (long long)stores, (long long)gathers, (long long)attends);
  return 0;
}

// Step 8, Hopper: wgmma multiplies 64 pixels by 128 filters by 8 terms in one instruction of four
// warps. Weights come from shared memory, where TMA puts them: one thread asks for a tile, and a
// barrier counts its bytes. Pixels come from registers. They are gathered for the next iteration
// while tensor cores work on this one. Tiles are packed as wgmma reads them, in rows of 128 bytes.
//
// operator: conv2d
// computes: tf32
// requires: groups == 1 && h + pad_top + pad_bottom < 16384 && w + pad_left + pad_right < 16384
// workspace: TILE_BYTES * ceil_div(k, FILTERS) * ceil_div(c * r * s, DEPTH)
// launch: conv2d_pack<<<dim3(ceil_div(c * r * s, DEPTH), ceil_div(k, FILTERS)), 256>>>(
//         weight, workspace, shape);
// launch: conv2d_wgmma<<<dim3(ceil_div(n * out_h * out_w, PIXELS), ceil_div(k, FILTERS)), THREADS,
//         STAGES * STAGE_BYTES + 1024>>>(x, workspace, bias, y, shape);
#include "cnn_engine/kernel.h"

#define PIXELS 128
#define FILTERS 128
#define DEPTH 32
#define TILE_BYTES 16640  // the weights, then the table of their terms
#define STAGE_BYTES 17408
#define STAGES 4
#define THREADS 256

__device__ unsigned tf32(float value) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

// Makes a tile: [FILTERS][DEPTH] weights, and (offset in an image, row << 16 | column) of each
// term.
extern "C" __global__ void conv2d_pack(const float* weight, float* workspace, Conv2d shape) {
  const int terms = shape.c * shape.r * shape.s;
  float* tile = workspace + (blockIdx.y * gridDim.x + blockIdx.x) * (TILE_BYTES / 4);
  for (int place = threadIdx.x; place < FILTERS * DEPTH; place += blockDim.x) {
    const int row = place / DEPTH, filter = blockIdx.y * FILTERS + row;
    const int column = place % DEPTH, term = blockIdx.x * DEPTH + column;
    const bool inside = filter < shape.k && term < terms;
    tile[row * DEPTH + (column / 4 ^ row % 8) * 4 + column % 4] =
        __uint_as_float(tf32(inside ? weight[filter * terms + term] : 0.0f));
  }
  if (threadIdx.x < DEPTH) {  // what is behind the last term lies below every image
    const int term = blockIdx.x * DEPTH + threadIdx.x;
    const int s = term % shape.s * shape.dilation_w,
              r = term / shape.s % shape.r * shape.dilation_h;
    const int c = term / shape.s / shape.r;
    reinterpret_cast<int2*>(tile + FILTERS * DEPTH)[threadIdx.x] =
        term < terms ? make_int2((c * shape.h + r) * shape.w + s, r << 16 | s)
                     : make_int2(0, 32767 << 16);
  }
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)

__device__ void multiply(float (&d)[64], const unsigned* a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,"
      "%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,"
      "%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"
      "%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1;"
      : D16(0), D16(16), D16(32), D16(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ void wait_barrier(unsigned barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv2d_wgmma(const float* __restrict__ x, const float* __restrict__ workspace,
                 const float* __restrict__ bias, float* __restrict__ y, Conv2d shape) {
  extern __shared__ char shared[];
  __shared__ unsigned long long full[STAGES];
  const unsigned barriers = static_cast<unsigned>(__cvta_generic_to_shared(full));
  const unsigned tiles = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023 & ~1023u;
  const int area = shape.out_h * shape.out_w, pixels = shape.n * area;
  const int steps = (shape.c * shape.r * shape.s + DEPTH - 1) / DEPTH;
  const int lane = threadIdx.x % 32;
  const int first = blockIdx.x * PIXELS + threadIdx.x / 32 * 16 + lane / 4;  // and the eighth after
  int top[2], left[2];
  long start[2];
  for (int e = 0; e < 2; ++e) {
    const int pixel = first + 8 * e;
    top[e] = pixel % area / shape.out_w * shape.stride_h - shape.pad_top;
    left[e] = pixel % shape.out_w * shape.stride_w - shape.pad_left;
    start[e] = (long)(pixel / area) * shape.c * shape.h * shape.w + top[e] * shape.w + left[e];
    if (pixel >= pixels) top[e] = -65536;  // above every image
  }
  auto fetch = [&](int step) {  // by one thread
    const unsigned stage = step % STAGES;
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];" ::
            "r"(barriers + 8 * stage),
        "r"(TILE_BYTES), "r"(tiles + stage * STAGE_BYTES),
        "l"(workspace + (blockIdx.y * steps + step) * (TILE_BYTES / 4))
        : "memory");
  };
  float values[4][4] = {};  // [8 terms][pixel + 2 * (term 4 later)]
  auto gather = [&](int step) {
    wait_barrier(barriers + 8 * (step % STAGES), step / STAGES % 2);
    const unsigned tile = tiles + step % STAGES * STAGE_BYTES;
    const unsigned table = tile + 4 * FILTERS * DEPTH + 8 * (lane % 4);
#pragma unroll
    for (int part = 0; part < 16; ++part) {
      int offset, window;
      const unsigned entry = table + part / 2 * 32, e = part % 2;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(offset), "=r"(window) : "r"(entry));
      const unsigned row = top[e] + (window >> 16), column = left[e] + (window & 65535);
      values[part / 4][part % 4] = row < shape.h && column < shape.w ? x[start[e] + offset] : 0.0f;
    }
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * stage) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int step = 0; step < min(STAGES, steps); ++step) fetch(step);
  }
  __syncthreads();
  float d[64] = {};
  gather(0);
  for (int step = 0; step < steps; ++step) {
    unsigned a[4][4];
    for (int k = 0; k < 4; ++k)
      for (int part = 0; part < 4; ++part) a[k][part] = tf32(values[k][part]);
    // Swizzle of 128 bytes, 1,024 bytes from eight rows to the next; 32 bytes of K an instruction.
    const unsigned tile = tiles + step % STAGES * STAGE_BYTES;
    const unsigned long long weights = 1ull << 62 | 64ull << 32 | 1ull << 16 | tile >> 4;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 4; ++k) multiply(d, a[k], weights + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (step + 1 < steps) gather(step + 1);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __syncthreads();  // all have read this stage
    if (threadIdx.x == 0 && step + STAGES < steps) fetch(step + STAGES);
  }
#pragma unroll
  for (int part = 0; part < 64; ++part) {
    const int filter = blockIdx.y * FILTERS + part / 4 * 8 + lane % 4 * 2 + part % 2;
    const int pixel = first + part % 4 / 2 * 8;
    if (filter < shape.k && pixel < pixels)
      y[((long)(pixel / area) * shape.k + filter) * area + pixel % area] =
          d[part] + (bias ? bias[filter] : 0.0f);
  }
}

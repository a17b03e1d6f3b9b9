// The kernel of --variant fused: images in, probabilities (or a last convolution's output) out.
//
// Contract: output[n] = the network's layers over images[n], for n < count. A block keeps the
// weights in shared memory for as long as it runs and is made of teams of warps. A team takes one
// image after another through all layers, with activations in its own part of shared memory, and
// waits only for itself (named barriers). The kernel neither allocates nor waits for the host: it
// may be captured into a graph.
//
// Many images: several teams a block, one block a multiprocessor; one team's arithmetic hides
// another's loads, conversions and waits. A layer that suits it is multiplied by the team as a
// warpgroup. Few: one team a block, of many warps. Very few: one team
// of the warps of a cluster of blocks; each block has all activations, because a result is stored
// in every block, and where a layer has too few tasks its kernel rows are summed by warps of one
// block and then added in a fixed order.
//
// Pixels: uint8 enter as pixel * multiply + add, float32 as they come. Values are 16-bit parts
// (conv.cuh) times powers of two that keep them in the format's range, up to activations of 2^75:
// fixed ones for uint8, whose largest value is known, and found from each image's own largest for
// float32. Threads: Route::kThreads a block. Shared memory: SharedLayout::kBytes. Images are 8-byte
// (uint8) or 16-byte (float32) aligned if `ahead`; otherwise their elements are loaded one by one.
#pragma once

#include "cuda/fused/pixels.cuh"
#include "cuda/fused/squares.cuh"
#include "cuda/fused/ticks.cuh"

namespace cnn_engine::cuda::fused {

template <class Net, class M, int Parts, int InputParts, class R, bool Timed>
struct Team : TeamInput<Net, M, Parts, InputParts, R> {
  using Input = TeamInput<Net, M, Parts, InputParts, R>;
  using S = typename Input::S;
  template <int I>
  using Layer = typename Net::template Layer<I>;
  using Input::barrier, Input::block_barrier, Input::first_image, Input::scales, Input::stage,
      Input::store_float, Input::store_uint8, Input::accumulators, Input::weights;
  using Input::p, Input::shared, Input::own, Input::team, Input::thread, Input::warp, Input::lane,
      Input::rank, Input::worker;
  using typename Input::Prefetch;
  PartClock<Timed, Net, Parts, R> clock;

  // Where a team has its blocks for itself, what a warp needs of the fully connected layer is on
  // its way from the kernel's start: one task's weights, and the bias.
  static constexpr bool kHoldsHead = Net::kClasses > 0 && R::kGroups == 1 &&
                                     (R::kCluster > 1 || Parts == 1) &&
                                     R::template filter_tiles<typename Net::Last, Parts>() == 1 &&
                                     R::template tasks<typename Net::Last, Parts>() <= R::kWorkers;
  // Warps that share a task ask for its weights before they wait for each other.
  static constexpr bool kEarlyHead = Net::kClasses > 0 &&
                                     R::template shares_accumulators<typename Net::Last, Parts>();
  float4 held_head[kHoldsHead || kEarlyHead ? Net::kClasses : 1];
  float held_bias;
  __device__ __forceinline__ void load_head_of(int tile) {  // of tiles of squares and filters
#pragma unroll
    for (int m = 0; m < Net::kClasses; ++m) {
      float4& w = held_head[m];  // not where it is needed: by a load that stays here
      asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(w.x), "=f"(w.y), "=f"(w.z), "=f"(w.w)
                   : "l"(p.head + (tile * Net::kClasses + m) * 32 + lane));
    }
  }
  __device__ __forceinline__ void load_head() {
    if constexpr (kHoldsHead) {
      if (worker < R::template tasks<typename Net::Last, Parts>()) load_head_of(worker);
    }
    if constexpr (kHoldsHead || kEarlyHead) {
      const float* bias = p.head_bias + (lane < Net::kClasses ? lane : 0);
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(held_bias) : "l"(bias));
    }
  }

  // Stores an activation in every block of the team.
  __device__ __forceinline__ void store(unsigned char* to, std::uint32_t value) const {
    if constexpr (R::kCluster > 1) {
      const std::uint32_t address = shared_address(to);
#pragma unroll
      for (int block = 0; block < R::kCluster; ++block)
        store_cluster(cluster_address(address, block), value);
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = value;
    }
  }

  // Accumulators of classes of a lane, a power of two; added up over the lanes, each lane has one
  // of them.
  static constexpr int lane_sums(int least = 1) {
    return least < Net::kClasses ? lane_sums(2 * least) : least;
  }
  static constexpr int kLaneSums = lane_sums();
  template <int Half = kLaneSums / 2>
  __device__ __forceinline__ float add_lanes(float (&sum)[kLaneSums]) const {
    if constexpr (Half > 0) {
      constexpr int kApart = 32 / kLaneSums * Half;
      const bool upper = (lane & kApart) != 0;
#pragma unroll
      for (int i = 0; i < Half; ++i) {
        const float kept = upper ? sum[i + Half] : sum[i], sent = upper ? sum[i] : sum[i + Half];
        sum[i] = kept + __shfl_xor_sync(kFullMask, sent, kApart);
      }
      return add_lanes<Half / 2>(sum);
    } else {
#pragma unroll
      for (int apart = 16 / kLaneSums; apart > 0; apart /= 2) {
        sum[0] += __shfl_xor_sync(kFullMask, sum[0], apart);
      }
      return sum[0];
    }
  }

  // Hands the result of layer I on: to the next layer's input, to the fully connected sums, or out.
  template <int I, int FilterTiles>
  __device__ __forceinline__ void hand_on(const Accumulators<Parts, FilterTiles>& result, int tile,
                                          int first_filter_tile, int task, int image) const {
    using G = Layer<I>;
    const Scale scale = scales()[I];
    const float* bias = reinterpret_cast<const float*>(weights() + S::template bias_at<I>()) +
                        8 * first_filter_tile;
    if constexpr (I + 1 < Net::kLayers) {
      using Next = Layer<I + 1>;
      using L = PlaneLayout<Next>;
      unsigned char* to =
          own + S::template input_at<I + 1>() + first_filter_tile * L::kPlaneBytes + lane % 4 * 4;
      finish<G, Parts, FilterTiles>(
          result, bias, scale.unscale, tile, lane,
          [&](int f, int position, int dy, int dx, float low, float high) {
            const int factor = G::kOne ? 1 : 2;
            const int row = position / G::kSquaresW * factor + dy;
            const int column = position % G::kSquaresW * factor + dx;
            if (!G::kWhole && (row >= G::kNextH || column >= G::kNextW)) return;
            const int y = row + Next::kPad, x = column + Next::kPad;
            std::uint32_t parts[Parts];
            split<M, Parts>(low * scale.rescale, high * scale.rescale, parts);
#pragma unroll
            for (int part = 0; part < Parts; ++part) {
              store(to + part * L::kBytes + f * L::kPlaneBytes + y * L::kRowBytes +
                        L::column_bytes(x),
                    parts[part]);
            }
          });
    } else if constexpr (Net::kClasses > 0) {
      float sum[kLaneSums] = {};
      static_assert(G::kOne, "the head reads one output of a square");
      float value[FilterTiles][2][2];
      if constexpr (G::kPositions % 16 != 0) {  // past the last: of no weight
#pragma unroll
        for (int i = 0; i < FilterTiles * 4; ++i) (&value[0][0][0])[i] = 0.0f;
      }
      finish<G, Parts, FilterTiles>(result, bias, scale.unscale, tile, lane,
                                    [&](int f, int position, int, int, float low, float high) {
                                      const int h = (position - tile * 16) / 8;
                                      value[f][h][0] = low;
                                      value[f][h][1] = high;
                                    });
      const std::uint32_t begin = clock.now();
#pragma unroll
      for (int f = 0; f < FilterTiles; ++f) {
        const float4* head =
            p.head + ((tile * G::kFilterTiles + first_filter_tile + f) * Net::kClasses) * 32 + lane;
#pragma unroll
        for (int m = 0; m < Net::kClasses; ++m) {
          float4 w;
          if constexpr (kHoldsHead || kEarlyHead)
            w = held_head[m];
          else
            w = __ldg(head + m * 32);
          sum[m] = fmaf(value[f][0][0], w.x,
                        fmaf(value[f][0][1], w.y,
                             fmaf(value[f][1][0], w.z, fmaf(value[f][1][1], w.w, sum[m]))));
        }
      }
      const float mine = add_lanes(sum);
      constexpr int kSame = 32 / kLaneSums;  // lanes that have the same sum
      if (lane % kSame == 0 && lane / kSame < Net::kClasses) {
        float* to = accumulators() + task * S::kAccumulatorStride + lane / kSame;
        if constexpr (R::kCluster > 1) {
          store_cluster(cluster_address(shared_address(to), 0), __float_as_uint(mine));
        } else {
          *to = mine;
        }
      }
      clock.epilogue_head(begin);
    } else {
      float* to = p.output + std::int64_t{image} * Net::kOutputs;
      finish<G, Parts, FilterTiles>(
          result, bias, scale.unscale, tile, lane,
          [&](int f, int position, int dy, int dx, float low, float high) {
            const int factor = G::kOne ? 1 : 2;
            const int y = position / G::kSquaresW * factor + dy,
                      x = position % G::kSquaresW * factor + dx;
            if (!G::kWhole && (y >= G::kNextH || x >= G::kNextW)) return;
            const int channel = 8 * (first_filter_tile + f) + 2 * (lane % 4);
            float* at = to + (channel * G::kNextH + y) * G::kNextW + x;
            if (channel < G::kFilters) at[0] = low;
            if (channel + 1 < G::kFilters) at[G::kNextH * G::kNextW] = high;
          });
    }
  }

  // Accumulators of a kernel row: [task of the block][row][pixel of a square][lane] of 4.
  template <class G>
  __device__ __forceinline__ float4* row_sums(int task, int row) const {
    return reinterpret_cast<float4*>(own + S::kRowSums) +
           (task * G::kKernel + row) * G::kPixels * 32 + lane;
  }
  template <class G>
  __device__ __forceinline__ void put_row(const Accumulators<Parts, 1>& result, int task,
                                          int row) const {
    float4* const to = row_sums<G>(task, row);
#pragma unroll
    for (int pixel = 0; pixel < G::kPixels; ++pixel) {
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[i] = result[0][pixel / 2][pixel % 2][0][i];
        if constexpr (Parts == 2) value[i] += result[1][pixel / 2][pixel % 2][0][i];
      }
      to[pixel * 32] = make_float4(value[0], value[1], value[2], value[3]);
    }
  }
  template <class G>
  __device__ __forceinline__ void add_rows(Accumulators<Parts, 1>& result, int task) const {
#pragma unroll
    for (int row = 0; row < G::kKernel; ++row) {
      const float4* const from = row_sums<G>(task, row);
#pragma unroll
      for (int pixel = 0; pixel < G::kPixels; ++pixel) {
        const float4 v = from[pixel * 32];
        float (&to)[4] = result[0][pixel / 2][pixel % 2][0];
        to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
      }
    }
  }

  // Where the last layer's input lies there, too: for its border.
  __device__ void clear_first_input() const {
    uint4* const to = reinterpret_cast<uint4*>(own + S::template input_at<0>());
    for (int i = thread; i < S::template input_bytes<0>() / 16; i += R::kTeamThreads) {
      to[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // Whether the team multiplies layer I as a warpgroup.
  template <int I>
  static constexpr bool by_warpgroups() {
    if constexpr (I == 0 || I + 1 >= Net::kLayers) {
      return false;
    } else {
      return kHasWarpgroups && Parts == 1 && R::kWarps == 4 && R::kCluster == 1 &&
             R::kKeptWeights && PlaneLayout<Layer<I>>::kForWarpgroups;
    }
  }
  template <int I>
  static constexpr bool kByWarpgroups = by_warpgroups<I>();

  template <int I>
  __device__ __forceinline__ void layer(int image, int next, Prefetch& ahead) {
    using G = Layer<I>;
    if constexpr (S::kOverlays && I == 1) clear_first_input();
    const unsigned char* from = weights() + S::template weights_at<I>();
    if constexpr (I + 1 == Net::kLayers) this->prefetch_input(ahead, next);
    if constexpr (I == 0) {
      constexpr int kAtOnce = R::kPixelTiles;
      constexpr int kFilterTiles = R::template filter_tiles<G, Parts>();
      constexpr int kTasks = R::template tasks<G, Parts>();
      static_assert(kAtOnce == 1 || kTasks == G::kTiles, "tiles at once have the same filters");
      const std::uint32_t* input =
          reinterpret_cast<const std::uint32_t*>(own + S::template input_at<0>());
      constexpr bool kHeld = kHeldPixelWeights<G, Parts> && kTasks == G::kTiles;
      HeldPixelWeights<G, Parts> held;
      if constexpr (kHeld) {
        constexpr int kSlabTiles = PixelLayout<G>::kSlabTiles;
#pragma unroll
        for (int i = 0; i < PixelLayout<G>::kSlabs * kSlabTiles; ++i) {
          load_weights<Parts, 2>(held[i / kSlabTiles][i % kSlabTiles], from + i * 256 * Parts,
                                 lane);
        }
      }
      for (int first = worker; first < kTasks; first += kAtOnce * R::kWorkers) {
        Accumulators<Parts, kFilterTiles> result[kAtOnce];
        int tile[kAtOnce];
        const int filter_tile = kTasks > G::kTiles ? first / G::kTiles * kFilterTiles : 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          tile[i] = kTasks > G::kTiles ? first % G::kTiles : first + i * R::kWorkers;
          clear<Parts, kFilterTiles>(result[i]);
        }
        sum_pixels<G, M, InputParts, Parts, kAtOnce, kFilterTiles, kHeld>(result, held, input, from,
                                                                          filter_tile, tile, lane);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (tile[i] < G::kTiles) {
            hand_on<0, kFilterTiles>(result[i], tile[i], filter_tile, tile[i], image);
          }
        }
      }
    } else {
      constexpr int kFilterTiles = R::template filter_tiles<G, Parts>();
      constexpr int kShares = G::kFilterTiles / kFilterTiles;  // tasks a tile
      const std::uint32_t input = shared_address(own + S::template input_at<I>());
      constexpr int kTasks = R::template tasks<G, Parts>();
      if constexpr (kByWarpgroups<I>) {
        for (int tile = warp; tile < G::kTiles; tile += R::kWarps) {
#pragma unroll 1
          for (int filter_tile = 0; filter_tile < G::kFilterTiles; filter_tile += 4) {
            Accumulators<Parts, 4> result;
            clear<Parts, 4>(result);
            sum_squares<G, M>(result, input, shared_address(from), filter_tile, tile - warp);
            hand_on<I, 4>(result, tile, filter_tile, 0, image);
          }
        }
      } else if constexpr (R::template splits_rows<G, Parts>()) {
        constexpr int kBlockTasks = R::template block_tasks<G, Parts>();
        for (int i = warp; i < kBlockTasks * G::kKernel; i += R::kWarps) {
          const int row = i / kBlockTasks, task = i % kBlockTasks * R::kCluster + rank;
          if (kTasks % R::kCluster != 0 && task >= kTasks) continue;
          Accumulators<Parts, 1> result;
          clear<Parts, 1>(result);
          sum_planes<G, M, Parts, 1>(result, input, from, task % kShares, task / kShares, row,
                                     row + 1, lane);
          put_row<G>(result, i % kBlockTasks, row);
        }
        block_barrier();
        for (int i = warp; i < kBlockTasks; i += R::kWarps) {
          const int task = i * R::kCluster + rank;
          if (kTasks % R::kCluster != 0 && task >= kTasks) continue;
          Accumulators<Parts, 1> result;
          clear<Parts, 1>(result);
          add_rows<G>(result, i);
          hand_on<I, 1>(result, task / kShares, task % kShares, task, image);
        }
      } else if constexpr (R::template shares_accumulators<G, Parts>()) {
        const int half = warp % 2, task = warp / 2;
        const int tile = task / kShares, filter_tile = task % kShares * 2;
        Accumulators<Parts, 2> result;
        clear<Parts, 2>(result);
        sum_half<G, M>(result, input, from, filter_tile, tile, half, lane);
        float4* const sent = reinterpret_cast<float4*>(own + S::kRowSums);
        const float (&mine)[4] = result[0][0][0][0], (&other)[4] = result[0][0][0][1];
        sent[warp * 32 + lane] = half ? make_float4(mine[0], mine[1], mine[2], mine[3])
                                      : make_float4(other[0], other[1], other[2], other[3]);
        Accumulators<Parts, 1> sum;
        clear<Parts, 1>(sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][0][0][0][i] = half ? other[i] : mine[i];
        if constexpr (kEarlyHead && I + 1 == Net::kLayers) {
          load_head_of(tile * G::kFilterTiles + filter_tile + half);
        }
        block_barrier();
        const float4 v = sent[(warp ^ 1) * 32 + lane];
        float (&to)[4] = sum[0][0][0][0];
        to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
        hand_on<I, 1>(sum, tile, filter_tile + half, 2 * task + half, image);
      } else {
        // A layer with fewer tasks than warps leaves the same warp of every team idle, and with it
        // a quarter of the multiprocessor, unless teams count from different warps.
        const int first = R::kCluster > 1 ? worker : (warp + team) % R::kWarps;
        for (int task = first; task < kTasks; task += R::kWorkers) {
          const int tile = task / kShares, filter_tile = task % kShares * kFilterTiles;
          Accumulators<Parts, kFilterTiles> result;
          clear<Parts, kFilterTiles>(result);
          sum_planes<G, M, Parts, kFilterTiles>(result, input, from, filter_tile, tile, 0,
                                                G::kKernel, lane);
          hand_on<I, kFilterTiles>(result, tile, filter_tile, task, image);
        }
      }
    }
    if constexpr (I + 1 == Net::kLayers) this->put_largest_ahead(ahead, next);
    if constexpr (I + 1 < Net::kLayers) wait_for_weights<I + 1>();
    if constexpr (kByWarpgroups<I + 1>) publish_to_wgmma();
    if constexpr (I + 1 < Net::kLayers || Net::kClasses > 0)
      barrier();
    else if constexpr (Timed)
      block_barrier();  // so that the part ends with its last warp
    clock.end(I);
    if constexpr (I + 1 < Net::kLayers) layer<I + 1>(image, next, ahead);
  }

  // Fully connected bias and softmax, by the team's first warp.
  __device__ void probabilities(int image) const {
    float logit = __int_as_float(0xff800000);  // minus infinity
    if (lane < Net::kClasses) {
      logit = kHoldsHead || kEarlyHead ? held_bias : __ldg(p.head_bias + lane);
#pragma unroll
      for (int row = 0; row < S::kAccumulatorRows; ++row)
        logit += accumulators()[row * S::kAccumulatorStride + lane];
    }
    clock.end(Net::kLayers);
    float largest = logit;
#pragma unroll
    for (int apart = kLaneSums / 2; apart > 0; apart /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, apart));
    }
    const float power = lane < Net::kClasses ? expf(logit - largest) : 0.0f;
    float total = power;
#pragma unroll
    for (int apart = kLaneSums / 2; apart > 0; apart /= 2) {
      total += __shfl_xor_sync(kFullMask, total, apart);
    }
    if (lane < Net::kClasses) p.output[std::int64_t{image} * Net::kClasses + lane] = power / total;
    clock.end(Net::kLayers + 1);
  }

  // What keeps one image's reads apart from the next image's writes:
  // - The first layer's input and what it is scaled by are written by their own block, after a
  //   barrier that every reader has come to: the one after the first layer, which is not the last;
  //   for the scales, which the last layer reads, the one in store_float, or of a team that loads
  //   ahead the last layer's own, or where it has none the one in run().
  // - The inputs after it are written by all blocks of a cluster. Their last reads come before the
  //   team's barrier after that layer. The last layer of a network without a head has no such
  //   barrier, so there a cluster's blocks meet before any stores for the next image.
  // - The head's sums are read by one warp, and written again after barriers that it comes to
  //   later. The sums of rows are written again after the barrier that follows their layer, or
  //   after the meeting.
  // - An input that the last layer's overlays is cleared by its own block: for that one between the
  //   barriers around the second layer, and for the next image between two of its own.
  // No block leaves while another may store into it: a barrier of the cluster follows those stores.
  static constexpr bool kMeetsBetweenImages = R::kCluster > 1 && Net::kClasses == 0;
  __device__ __forceinline__ void run(Prefetch& ahead) {
    static_assert(Net::kLayers >= 2, "a barrier between reading one image and writing the next");
    const int step = gridDim.x * R::kGroups / R::kCluster;
    for (int image = first_image(); image < p.count; image += step) {
      // At its first image a block whose weights come layer by layer has those still under way.
      if (kByLayer && image == first_image()) {
        wait_for_copies<Net::kLayers>();
      } else {
        wait_for_copies<0>();
      }
      if (S::kOverlays && image != first_image()) {
        block_barrier();
        clear_first_input();
        block_barrier();
      }
      if (S::kPrefetchDepth && Net::kClasses == 0) block_barrier();
      if (p.is_uint8)
        store_uint8(image, ahead);
      else
        store_float(image, ahead);
      wait_for_weights<0>();
      // Before it no other block may be stored into: its inputs may not be cleared yet.
      if (R::kCluster > 1 && image == first_image()) wait_at_cluster_barrier();
      if (kMeetsBetweenImages && image != first_image()) {
        barrier();
      } else {
        block_barrier();
      }
      stage(image + step);
      layer<0>(image, image + step, ahead);
      if constexpr (Net::kClasses > 0) {
        static_assert(Net::kClasses <= 32, "one lane a class");
        if (warp == 0 && rank == 0) probabilities(image);
      }
    }
  }

  // Weights come layer by layer where one team has the block for itself: by one bulk copy each in a
  // cluster, else by a group of small copies each. The biases come with the first.
  static constexpr bool kByLayer = R::kGroups == 1 && R::kCluster == 1 && R::kKeptWeights;

  __device__ std::uint32_t weight_barrier(int layer) const {
    return shared_address(shared + S::kWeightBarriers + 8 * layer);
  }

  template <int I>
  __device__ void load_weights_of() const {
    constexpr int kFrom = S::template weights_at<I>();
    constexpr int kTo = kFrom + Net::template weight_bytes<I, Parts>();
    constexpr int kBiasBytes = I == 0 ? S::kWeightBytes - S::kBiases : 0;
    if constexpr (R::kCluster > 1) {
      if (thread == 0) {
        init_barrier(weight_barrier(I));
        expect_tx(weight_barrier(I), kTo - kFrom + kBiasBytes);
        copy_bulk(shared_address(shared + kFrom), p.weights + kFrom, kTo - kFrom,
                  weight_barrier(I));
        if constexpr (I == 0) {
          copy_bulk(shared_address(shared + S::kBiases), p.weights + S::kBiases, kBiasBytes,
                    weight_barrier(I));
        }
      }
    } else {
      copy_weights(kFrom, kTo);
      if constexpr (I == 0) copy_weights(S::kBiases, S::kWeightBytes);
      commit_copies();
    }
    if constexpr (I + 1 < Net::kLayers) load_weights_of<I + 1>();
  }

  // Before the barrier that precedes layer I. Groups committed after its own: those of the layers
  // after it, and from the second layer on the next image.
  template <int I>
  __device__ void wait_for_weights() const {
    if constexpr (R::kCluster > 1) {
      wait_first_phase(weight_barrier(I));
    } else if constexpr (kByLayer) {
      wait_for_copies<Net::kLayers - 1 - I + (I > 0)>();
    }
  }

  __device__ void copy_weights(int from, int to) const {
    for (int at = from + 16 * static_cast<int>(threadIdx.x); at < to; at += 16 * R::kThreads) {
      copy_async<16>(shared + at, p.weights + at);
    }
  }
};

#ifdef __CUDA_ARCH__
constexpr int kArchitecture = __CUDA_ARCH__ / 10;
#else
constexpr int kArchitecture = 90;
#endif
// Whether the architecture that is compiled for can run the kernel, instrumented or not.
template <class Net, int Parts, int InputParts, class R>
constexpr bool kCanRun = kTimedBytes<Net, Parts, InputParts, R> <= shared_of(kArchitecture) &&
                         (R::kCluster == 1 || kArchitecture >= 90);

// A kernel's body; `p` are its parameters, of an instrumented one TimedParameters.
template <class Net, class M, int Parts, int InputParts, class R, bool Timed, class P>
__device__ __forceinline__ void run_network(const P& p) {
  if constexpr (kCanRun<Net, Parts, InputParts, R>) {
    using S = SharedLayout<Net, Parts, InputParts, R>;
    extern __shared__ __align__(128) unsigned char shared[];
    let_successors_start();  // layers of rows, which fetch their weights meanwhile
    const int team = threadIdx.x / R::kTeamThreads, thread = threadIdx.x % R::kTeamThreads;
    const int warp = thread / 32, rank = R::kCluster > 1 ? cluster_rank() : 0;
    Team<Net, M, Parts, InputParts, R, Timed> self{
        {p, shared, shared + S::kFirstTeam + team * S::kTeamBytes, team, thread, warp, thread % 32,
         // Neighbouring tasks go to different blocks, and in a block to different quarters.
         rank, warp * R::kCluster + rank},
        {}};
    if constexpr (Timed) {
      auto* ticks = reinterpret_cast<unsigned long long*>(shared + S::kBytes);
      constexpr int kParts = kKernelParts<Net>;
      self.clock = {p.ticks, ticks + team * kParts, ticks + R::kGroups * kParts + threadIdx.x / 32,
                    thread == 0 && rank == 0, thread % 32 == 0};
      self.clock.start();
    }
    typename decltype(self)::Prefetch ahead;
    if constexpr (S::kPrefetchDepth) {
      self.prefetch_input(ahead, self.first_image());
      commit_copies();  // as many groups as without
    } else {
      self.stage(self.first_image());
    }
    if constexpr (R::kKeptWeights) self.template load_weights_of<0>();
    self.load_head();
    // Borders are zeros and stay so: only the inside is written from here on.
    for (int i = thread; i < S::kStaged / 16; i += R::kTeamThreads) {
      reinterpret_cast<uint4*>(self.own)[i] = make_uint4(0, 0, 0, 0);
    }
    if (thread < Net::kLayers) self.scales()[thread] = p.scale[thread];
    if constexpr (R::kGroups > 1) wait_for_copies<0>();
    publish_to_wgmma();
    self.put_largest_ahead(ahead, self.first_image());
    if constexpr (R::kCluster > 1) arrive_at_cluster_barrier();
    __syncthreads();
    self.run(ahead);
    self.clock.add_to();
  }
}

}  // namespace cnn_engine::cuda::fused

// Two warps that share 32 rows, for head dims at which O of two strips has no room in the registers of one. Of a tile of keys
// each makes the scores of one half and weighs them; it hands these weights to its partner through shared memory, and makes
// O of both strips, all keys and every second 16 channels. So a warp reads Q, half of K, half of V and half of P for 32 rows,
// where a warp on its own reads Q, K and V for 16.
//
//   this warp             S of its keys   its weights P           O += P V of its keys, then of its partner's
//   shared memory                         ^ P, whether it asks    ^ its partner's P, whether that asks
//   barrier of the pair                                          ^
//
// Weights are taken under the m that there is, as attention/quad_softmax.cuh says, which has to be the same in both warps: each
// scales its channels of O by it. So where a lane of either asks for another m, both exchange what they ask for and the
// greatest scores of their halves, and weigh again. Sums l stay apart until the end.
//
// SAFETY: what is written for the partner before a barrier of the pair is read after it. It is written again for the next
// tile, after a __syncthreads() that the partner reaches when it has read; or, when both weigh again, after a
// barrier of the pair before which it was not read. Both warps skip the same tiles, since they see the same rows.
#pragma once

#include "attention/quad_softmax.cuh"
#include "device/ptx/warpgroup.cuh"
#include "forward/mma/config.hpp"

namespace cuflash::forward_mma {

enum NamedBarrier : uint32_t { kBarPair = 1 };  // and one more for each pair; 0 is __syncthreads()

template <class Config>
struct Pair {
  static_assert(kBarPair + Config::kTile.warps / 2 <= 16, "there are 16 barriers");
  using Storage = PairStorage<Config>;
  static constexpr int kStrips = Config::kStrips;

  Storage& s;
  unsigned warp, lane;

  __device__ unsigned partner() const { return warp ^ 1; }
  __device__ void meet() const { device::ptx::named_barrier_sync(kBarPair + warp / 2, 64); }

  // Hands this warp's weights over, and whether it asks for another m: `asks` is the same in all lanes.
  template <int kSteps>
  __device__ void give(const uint32_t (&p)[kStrips][kSteps][4], bool asks) const {
    static_assert(kStrips * kSteps == Storage::kFragments);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t(&a)[4] = p[strip][step];
        *reinterpret_cast<uint4*>(s.weights[warp][strip * kSteps + step].of_lane[lane]) =
            make_uint4(a[0], a[1], a[2], a[3]);
      }
    if (lane == 0) s.asks[warp] = asks;
    meet();
  }
  __device__ bool partner_asks() const { return s.asks[partner()] != 0; }
  // The partner's weights. After give().
  template <int kSteps>
  __device__ void take(uint32_t (&p)[kStrips][kSteps][4]) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 a = *reinterpret_cast<const uint4*>(
            s.weights[partner()][strip * kSteps + step].of_lane[lane]);
        p[strip][step][0] = a.x, p[strip][step][1] = a.y;
        p[strip][step][2] = a.z, p[strip][step][3] = a.w;
      }
  }

  // The place of a row that this lane has two of for each strip.
  __device__ static unsigned row_of(int strip, int r, unsigned lane) {
    return strip * kStripRows + 8 * r + lane / 4;
  }

  // quad_weigh_under_new_maximum() for a tile of which the partner has the other keys. `asks` are those of this warp's lanes.
  template <class Element, int kCount, int kSteps>
  __device__ void weigh_under_new_maximum(const float (&scores)[kStrips][kCount], float scale_log2,
                                          const uint32_t (&asks)[kStrips],
                                          QuadRows (&rows)[kStrips],
                                          uint32_t (&p)[kStrips][kSteps][4],
                                          float (&factor)[kStrips][2]) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      uint32_t of_row = asks[strip];
      of_row |= __shfl_xor_sync(0xffffffffu, of_row, 1);
      of_row |= __shfl_xor_sync(0xffffffffu, of_row, 2);
      float m[2] = {rows[strip].m[0], rows[strip].m[1]};
#pragma unroll
      for (int i = 0; i < kCount; ++i) m[i / 2 % 2] = fmaxf(m[i / 2 % 2], scores[strip][i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float greatest = quad_max(m[r]);
        if (lane % 4 == 0) s.rows[warp][row_of(strip, r, lane)] = {greatest, of_row >> r & 1};
      }
    }
    meet();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      float now[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto own = s.rows[warp][row_of(strip, r, lane)];
        const auto other = s.rows[partner()][row_of(strip, r, lane)];
        now[r] = (own.asks | other.asks) != 0 ? fmaxf(own.value, other.value) : rows[strip].m[r];
      }
      weigh_under<Element>(scores[strip], scale_log2, now, rows[strip], p[strip], factor[strip]);
    }
  }

  // This warp's sums l, for the partner.
  __device__ void give_sums(const QuadRows (&rows)[kStrips]) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float l = quad_sum(rows[strip].l[r]);
        if (lane % 4 == 0) s.rows[warp][row_of(strip, r, lane)].value = l;
      }
    meet();
  }
  __device__ float sum_of_partner(int strip, int r) const {
    return s.rows[partner()][row_of(strip, r, lane)].value;
  }

 private:
  // Weights under the maxima `now`, and the factors of what was summed before. A row whose m stays gets the bits that
  // quad_weigh() gave it.
  template <class Element, int kCount, int kSteps>
  __device__ static void weigh_under(const float (&scores)[kCount], float scale_log2,
                                     const float (&now)[2], QuadRows& rows,
                                     uint32_t (&p)[kSteps][4], float (&factor)[2]) {
    float used[2], offset[2];
    bool near[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      used[r] = now[r] == negative_infinity() ? 0 : now[r];  // -inf - -inf is no number
      factor[r] = device::ptx::ex2_approx_ftz((rows.m[r] - used[r]) * scale_log2);
      rows.m[r] = now[r];
      offset[r] = -used[r] * scale_log2;
      near[r] = quad_is_near(offset[r]);
    }
    float sum[2];
    quad_exponentiate<Element>(
        scores,
        [&](float x, int r) {
          return near[r] ? fmaf(x, scale_log2, offset[r]) : (x - used[r]) * scale_log2;
        },
        p, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.l[r] = rows.l[r] * factor[r] + sum[r];
  }
};

}  // namespace cuflash::forward_mma

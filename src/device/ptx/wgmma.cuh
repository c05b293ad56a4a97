// Asynchronous matrix products of a warpgroup (sm_90a): D[64][N] += A[64][16] B[16][N], 16-bit operands, fp32 sums.
// The size of d chooses N. Every call belongs between wgmma_fence() and wgmma_commit(); d, and an A in registers, may not
// be touched until wgmma_wait(). PTX ISA: "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async".
//
// With w the warp of the warpgroup, g = lane / 4 and t = lane % 4, thread registers hold
//   d[i]  row 16w + g + 8 ((i / 2) % 2), column 8 (i / 4) + 2t + i % 2
//   a[i]  row 16w + g + 8 (i % 2), columns 2t + 8 (i / 2) + {0, 1}, the lower one in the lower half
// so d[8j .. 8j + 7], rounded and packed in pairs, is the A of 16 columns j.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::device::ptx {

// Orders accesses to registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups, the youngest, are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define CUFLASH_WGMMA_8(d, i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CUFLASH_WGMMA_16(d, i) CUFLASH_WGMMA_8(d, i), CUFLASH_WGMMA_8(d, i + 8)
#define CUFLASH_WGMMA_32(d, i) CUFLASH_WGMMA_16(d, i), CUFLASH_WGMMA_16(d, i + 16)
#define CUFLASH_WGMMA_40(d, i) CUFLASH_WGMMA_32(d, i), CUFLASH_WGMMA_8(d, i + 32)
#define CUFLASH_WGMMA_48(d, i) CUFLASH_WGMMA_32(d, i), CUFLASH_WGMMA_16(d, i + 32)
#define CUFLASH_WGMMA_56(d, i) CUFLASH_WGMMA_48(d, i), CUFLASH_WGMMA_8(d, i + 48)
#define CUFLASH_WGMMA_64(d, i) CUFLASH_WGMMA_32(d, i), CUFLASH_WGMMA_32(d, i + 32)
#define CUFLASH_WGMMA_80(d, i) CUFLASH_WGMMA_64(d, i), CUFLASH_WGMMA_16(d, i + 64)
#define CUFLASH_WGMMA_96(d, i) CUFLASH_WGMMA_64(d, i), CUFLASH_WGMMA_32(d, i + 64)
#define CUFLASH_WGMMA_128(d, i) CUFLASH_WGMMA_64(d, i), CUFLASH_WGMMA_64(d, i + 64)

#define CUFLASH_WGMMA_TEXT_32                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUFLASH_WGMMA_TEXT_40                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39"
#define CUFLASH_WGMMA_TEXT_48                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define CUFLASH_WGMMA_TEXT_56                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55"
#define CUFLASH_WGMMA_TEXT_64                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CUFLASH_WGMMA_TEXT_80                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define CUFLASH_WGMMA_TEXT_96                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CUFLASH_WGMMA_TEXT_128                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// One N: the text of its registers, then the operands that follow them. From shared memory both A and B are
// K-major (trans 0); from registers B is MN-major (trans 1), as V lies.
#define CUFLASH_WGMMA(n, count, o0, o1, o2, o3, o4, o5)                                     \
  template <class Element>                                                                  \
  __device__ __forceinline__ void wgmma_m64k16_ss(float(&d)[count], uint64_t a, uint64_t b, \
                                                  bool accumulate) {                        \
    if constexpr (std::is_same_v<Element, __half>)                                          \
      CUFLASH_WGMMA_SS(n, count, "f16", o0, o1, o2);                                        \
    else                                                                                    \
      CUFLASH_WGMMA_SS(n, count, "bf16", o0, o1, o2);                                       \
  }                                                                                         \
  template <class Element>                                                                  \
  __device__ __forceinline__ void wgmma_m64k16_rs(float(&d)[count], const uint32_t(&a)[4],  \
                                                  uint64_t b, bool accumulate) {            \
    if constexpr (std::is_same_v<Element, __half>)                                          \
      CUFLASH_WGMMA_RS(n, count, "f16", o0, o1, o2, o3, o4, o5);                            \
    else                                                                                    \
      CUFLASH_WGMMA_RS(n, count, "bf16", o0, o1, o2, o3, o4, o5);                           \
  }
#define CUFLASH_WGMMA_SS(n, count, type, a_, b_, scale_)                              \
  asm volatile("{.reg .pred p;\n setp.ne.b32 p, " scale_                              \
               ", 0;\n"                                                               \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type        \
               " {" CUFLASH_WGMMA_TEXT_##count "}, " a_ ", " b_ ", p, 1, 1, 0, 0;}\n" \
               : CUFLASH_WGMMA_##count(d, 0)                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define CUFLASH_WGMMA_RS(n, count, type, a0_, a1_, a2_, a3_, b_, scale_)                      \
  asm volatile("{.reg .pred p;\n setp.ne.b32 p, " scale_                                      \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                \
               " {" CUFLASH_WGMMA_TEXT_##count "}, {" a0_ ", " a1_ ", " a2_ ", " a3_ "}, " b_ \
                                               ", p, 1, 1, 1;}\n"                             \
               : CUFLASH_WGMMA_##count(d, 0)                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                 "r"(static_cast<int>(accumulate)))

CUFLASH_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
CUFLASH_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
CUFLASH_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
CUFLASH_WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
CUFLASH_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
CUFLASH_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
CUFLASH_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
CUFLASH_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef CUFLASH_WGMMA
#undef CUFLASH_WGMMA_SS
#undef CUFLASH_WGMMA_RS
#undef CUFLASH_WGMMA_8
#undef CUFLASH_WGMMA_16
#undef CUFLASH_WGMMA_32
#undef CUFLASH_WGMMA_40
#undef CUFLASH_WGMMA_48
#undef CUFLASH_WGMMA_56
#undef CUFLASH_WGMMA_64
#undef CUFLASH_WGMMA_80
#undef CUFLASH_WGMMA_96
#undef CUFLASH_WGMMA_128
#undef CUFLASH_WGMMA_TEXT_32
#undef CUFLASH_WGMMA_TEXT_48
#undef CUFLASH_WGMMA_TEXT_64
#undef CUFLASH_WGMMA_TEXT_80
#undef CUFLASH_WGMMA_TEXT_96
#undef CUFLASH_WGMMA_TEXT_128

}  // namespace cuflash::device::ptx

// The shape of the matrices that WMMA kernels multiply. No CUDA header: the variant tables read it too.
#pragma once

namespace cuflash::device {

constexpr int kFragment = 16;  // m, n and k

}  // namespace cuflash::device

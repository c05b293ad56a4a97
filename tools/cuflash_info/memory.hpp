// Memory of a device, for the self-test. That of CUDA devices comes through the driver, loaded at run time: the
// program links no CUDA and starts where there is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cuflash_info {

class Memory {
 public:
  virtual ~Memory() = default;
  // Freed with the Memory.
  virtual void* allocate(size_t bytes) = 0;
  virtual void write(void* to, const void* from, size_t bytes) = 0;
  // After the work enqueued on the default stream so far.
  virtual void read(void* to, const void* from, size_t bytes) = 0;
};

// Of a device as cuflash_create() takes it; throws std::runtime_error.
std::unique_ptr<Memory> memory_of(int32_t device);

// What a CUDA device is called; throws std::runtime_error.
std::string model_of(int32_t device);

}  // namespace cuflash_info

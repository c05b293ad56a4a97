# Warnings, determinism of the build, and the flags of CUDA units: the one place for compiler flags.
function(cuflash_compile_options target)
  set(host_warnings -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion)
  # nvcc's host pass includes generated code that -Wpedantic and -Wconversion reject.
  set(cuda_warnings -Wall -Wextra -Wshadow)
  if(CUFLASH_WERROR)
    list(APPEND host_warnings -Werror)
    list(APPEND cuda_warnings -Werror)
  endif()
  # -fno-gnu-unique: no symbol that the loader shares between libraries. -ffp-contract=off: the CPU
  # device gives the same bits whatever the compiler's taste in fused multiply-add.
  set(common -fno-gnu-unique -fstack-protector-strong -ffile-prefix-map=${PROJECT_SOURCE_DIR}=.
    -ffile-prefix-map=${PROJECT_BINARY_DIR}=build)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(REMOVE_ITEM common -fno-gnu-unique)
  endif()
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${host_warnings};${common};-ffp-contract=off>)
  if(CUFLASH_CUDA)
    list(JOIN cuda_warnings "," cuda_warnings)
    list(JOIN common "," cuda_common)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${cuda_warnings},${cuda_common}>"
      "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xptxas=-v;--objdir-as-tempdir>")
    if(CUFLASH_LINEINFO)
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
    endif()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
    endif()
  endif()
endfunction()

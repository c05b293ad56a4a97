# The units of the CPU device that are compiled for newer x86-64 processors; the library asks at run time which it may
# enter. Elsewhere only the baseline is built.
function(cuflash_add_vector_levels target)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    return()
  endif()
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 finds undefined values in its own intrinsics.
    list(APPEND avx512 -Wno-maybe-uninitialized)
  endif()
  foreach(level avx2 avx512)
    set(unit src/cpu/blocked/level_${level}.cpp)
    target_sources(${target} PRIVATE ${unit})
    set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "${${level}}")
  endforeach()
endfunction()

# What `cmake --install` and the packages lay down: the library, the headers, and two ways to find
# them (CMake's find_package and pkg-config). A consumer needs no CUDA toolkit: the CUDA runtime is
# inside the library and no header asks for one.
include(CMakePackageConfigHelpers)

set(_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cuflash)

install(TARGETS cuflash EXPORT cuflashTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  COMPONENT runtime NAMELINK_COMPONENT development)
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)

install(EXPORT cuflashTargets NAMESPACE cuflash:: DESTINATION ${_config_dir} COMPONENT development)
configure_package_config_file(cmake/cuflashConfig.cmake.in cuflashConfig.cmake
  INSTALL_DESTINATION ${_config_dir})
# Releases before 1.0 promise compatibility within a minor version only.
write_basic_package_version_file(cuflashConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cuflashConfig.cmake
  ${PROJECT_BINARY_DIR}/cuflashConfigVersion.cmake
  DESTINATION ${_config_dir} COMPONENT development)

# The prefix is known only when installing. In /usr the file spells it out, since pkg-config drops
# -I/usr/include and -L/usr/lib only in that spelling; elsewhere it follows the file's own place, so
# that the tree can be moved.
file(RELATIVE_PATH _pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" _pc_to_prefix "${_pc_to_prefix}")
set(CUFLASH_PC_PREFIX "\${pcfiledir}/${_pc_to_prefix}")
configure_file(cmake/cuflash.pc.in pkgconfig/relocatable/cuflash.pc @ONLY)
set(CUFLASH_PC_PREFIX /usr)
configure_file(cmake/cuflash.pc.in pkgconfig/usr/cuflash.pc @ONLY)
install(CODE "
  set(kind relocatable)
  if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
    set(kind usr)
  endif()
  file(INSTALL \"${PROJECT_BINARY_DIR}/pkgconfig/\${kind}/cuflash.pc\"
    DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig\")"
  COMPONENT development)

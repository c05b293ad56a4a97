# Debian packages: `cpack --config build/<preset>/CPackConfig.cmake` makes libcuflash0 (the library)
# and libcuflash-dev (headers, CMake and pkg-config files). tests/package checks them.
set(_runtime libcuflash${CUFLASH_SOVERSION})
set(_control ${PROJECT_BINARY_DIR}/deb-control)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME cuflash)
set(CPACK_PACKAGE_VENDOR cuflash)
set(CPACK_PACKAGE_CONTACT "The cuflash authors <cuflash@example.org>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL runtime development)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SOURCE cuflash)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_STRIP_FILES ON)
set(CMAKE_STRIP ${PROJECT_SOURCE_DIR}/packaging/strip.sh)

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ${_runtime})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_MULTIARCH same)
if(CUFLASH_CUDA)
  # The driver's package has many names, and containers bring the driver from outside: no Depends.
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS "libcuda1 | libnvidia-compute-580")
endif()
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libcuflash-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_MULTIARCH same)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS
  "${_runtime} (= ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")

# CPack indents the lines itself, and takes the first as the synopsis if there is no summary.
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")
set(_about "cuflash computes exact attention without storing the matrix of scores, on
NVIDIA GPUs and on the CPU. Its interface is one C header; it needs no
framework and no CUDA toolkit.")
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "exact attention as a system library - runtime
${_about}

This package holds the shared library.")
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "exact attention as a system library - development files
${_about}

This package holds the C and C++ headers, the CMake and pkg-config files.")

# Control files and the ldconfig trigger are written here and not by CPack's own options, which make
# CPack 3.25 add maintainer scripts that call ldconfig. cpack-deb.cmake adds Depends and symbols.
file(WRITE ${_control}/shlibs
  "libcuflash ${CUFLASH_SOVERSION} ${_runtime} (>= ${PROJECT_VERSION})\n")
file(WRITE ${_control}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
  "${_control}/shlibs;${_control}/symbols;${_control}/triggers")
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/cpack-deb.cmake)
set(CPACK_CUFLASH_CONTROL ${_control})
set(CPACK_CUFLASH_LIBRARY ${PROJECT_BINARY_DIR}/lib/libcuflash.so.${PROJECT_VERSION})

# Documents that Debian wants in each package.
find_program(GZIP_PROGRAM gzip REQUIRED)
configure_file(packaging/debian/changelog.in ${_control}/changelog.Debian @ONLY)
execute_process(COMMAND ${GZIP_PROGRAM} -9nkf ${_control}/changelog.Debian
  COMMAND_ERROR_IS_FATAL ANY)
foreach(_component runtime development)
  string(TOUPPER ${_component} _upper)
  install(FILES ${_control}/changelog.Debian.gz packaging/debian/copyright
    DESTINATION share/doc/${CPACK_DEBIAN_${_upper}_PACKAGE_NAME}
    COMPONENT ${_component})
endforeach()

include(CPack)

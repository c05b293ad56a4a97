# Run by cpack: works out what the built library depends on and which symbols it offers.
if(NOT CPACK_GENERATOR STREQUAL "DEB")
  return()
endif()
set(_package ${CPACK_DEBIAN_RUNTIME_PACKAGE_NAME})
set(_work ${CPACK_CUFLASH_CONTROL}/work)
file(REMOVE_RECURSE ${_work})
file(WRITE ${_work}/debian/control "Source: cuflash\n\nPackage: ${_package}\nArchitecture: any\n")

execute_process(COMMAND dpkg-shlibdeps -O -e${CPACK_CUFLASH_LIBRARY}
  WORKING_DIRECTORY ${_work} OUTPUT_VARIABLE _depends COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE "^.*shlibs:Depends=([^\n]*).*$" "\\1" CPACK_DEBIAN_RUNTIME_PACKAGE_DEPENDS
  "${_depends}")

set(_symbols ${CPACK_CUFLASH_CONTROL}/symbols)
execute_process(
  COMMAND dpkg-gensymbols -p${_package} -v${CPACK_PACKAGE_VERSION} -P${_work}
    -e${CPACK_CUFLASH_LIBRARY} -O${_symbols}
  WORKING_DIRECTORY ${_work} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(READ ${_symbols} _text)
string(REPLACE "#MINVER#\n" "#MINVER#\n* Build-Depends-Package: libcuflash-dev\n" _text "${_text}")
file(WRITE ${_symbols} "${_text}")

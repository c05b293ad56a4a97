# cuflash_add_program(NAME SOURCE ...): a program of the package cuflash-tools, on the public headers alone, with its
# man page NAME.1 beside the sources.
function(cuflash_add_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE cuflash)
  cuflash_compile_options(${name})
  # DT_RUNPATH: LD_LIBRARY_PATH may put another library in place.
  target_link_options(${name} PRIVATE -Wl,--enable-new-dtags)
  # The installed program finds the library beside it in any prefix. In /usr the loader looks there anyway, and packages
  # must not name such a path. $ORIGIN also in the build: an absolute path would be in the program's build-id, and so in
  # its package.
  file(RELATIVE_PATH bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin BUILD_RPATH_USE_ORIGIN ON
    INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  install(CODE "
    if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
      file(RPATH_REMOVE FILE
        \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/${name}\")
    endif()"
    COMPONENT tools)
  install(FILES ${name}.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools)
endfunction()

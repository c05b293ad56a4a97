# Run by cpack on the files of all packages: compresses what Debian wants compressed, without a date, and
# gives folders their permissions whatever the umask (CPack's own variable for it leaves out ./usr).
file(GLOB_RECURSE _files LIST_DIRECTORIES false
  ${CPACK_TEMPORARY_DIRECTORY}/*/usr/share/man/*.[1-9]
  ${CPACK_TEMPORARY_DIRECTORY}/*/usr/share/doc/changelog
  ${CPACK_TEMPORARY_DIRECTORY}/*/usr/share/doc/changelog.Debian)
execute_process(COMMAND gzip -9n ${_files} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND find ${CPACK_TEMPORARY_DIRECTORY} -type d -exec chmod 755 {} +
  COMMAND_ERROR_IS_FATAL ANY)

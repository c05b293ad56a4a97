# Finding the library. A process has one, so others are looked for in processes of their own.

@testset "library" begin
    @test CUFlash.functional() && CUFlash.functional(true)
    @test CUFlash.version() >= VersionNumber(Raw.CUFLASH_VERSION_MAJOR, Raw.CUFLASH_VERSION_MINOR)
    @test isfile(CUFlash.library_path())
    @test startswith(CUFlash.build_info(), "cuflash ")

    function answer(environment...)
        code = "using CUFlash; print(CUFlash.functional(true))"
        command = `$(Base.julia_cmd()) --startup-file=no --compile=min -O0
                   --project=$(pkgdir(CUFlash)) -e $code`
        kept = filter(pair -> !startswith(first(pair), "CUFLASH_"), Dict(ENV))
        output = IOBuffer()
        run(pipeline(setenv(command, merge(kept, Dict(environment...))); stdout = output,
                     stderr = output))
        return String(take!(output))
    end

    directory = mktempdir()
    symlink(realpath(CUFlash.library_path()), joinpath(directory, "libcuflash.so.0"))
    @test answer("CUFLASH_LIB_DIR" => directory) == "true"
    for (name, value) in (("CUFLASH_LIBRARY", "/no/such/libcuflash.so.0"), ("CUFLASH_LIB_DIR", "/no/where"))
        text = answer(name => value)
        @test endswith(text, "false") && occursin("not found", text) && occursin(value, text)
    end
    libc = answer("CUFLASH_LIBRARY" => "libc.so.6")
    @test occursin("another library, without cuflash_abi_version", libc)
end

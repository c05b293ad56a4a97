@testset "handles" begin
    handle = CUFlash.Handle(:cpu)
    CUFlash.set_option!(handle, Raw.CUFLASH_OPTION_CPU_THREADS, 1)
    @test CUFlash.get_option(handle, Raw.CUFLASH_OPTION_CPU_THREADS) == 1
    @test_throws CUFlash.CUFlashError CUFlash.set_option!(handle, 99, 0)
    q = numbers(Float32, 8, 5, 2, 1)
    CUFlash.set_kernel!(handle, "reference")
    @test occursin("\"family\": \"reference\"", CUFlash.explain(:forward, q, q, q; handle = handle))
    CUFlash.set_kernel!(handle, "")
    @test first(attention(q, q, q; handle = handle)) ≈ first(reference(q, q, q))
    close(handle)
    close(handle)
    @test_throws ArgumentError CUFlash.set_option!(handle, 1, 1)
end

@testset "threads" begin
    # A message is its thread's own, and one handle serves all.
    q, k = numbers(Float32, 16, 10, 2, 1), numbers(Float32, 16, 20, 1, 1)
    expected = first(reference(q, k, k))
    found = zeros(64)
    messages = fill("", 64)
    Threads.@threads for i in 1:64
        found[i] = difference(first(attention(q, k, k)), expected)
        try
            attention(q, k, k; scale = -i)
        catch error
            messages[i] = error.message
        end
    end
    @test all(found .< 1e-5)
    @test all(i -> occursin("-$i", messages[i]), 1:64)
end

# The raw layer agrees with libclang's reading of the header, and with the library.

include("layouts.jl")

@testset "layouts" begin
    for (type, size, fields) in LAYOUTS
        @test sizeof(type) == size
        @test fieldnames(type) == map(first, fields)
        @test [fieldoffset(type, i) for i in 1:fieldcount(type)] == collect(map(last, fields))
    end
end

@testset "functions" begin
    @test all(name -> CUFlash.symbol(name) != C_NULL && isdefined(Raw, name), FUNCTIONS)
    @test_throws ErrorException CUFlash.symbol(:cuflash_no_such_function)
end

@testset "structs" begin
    problem = Raw.cuflash_problem_t(batch = 2, scale = 0.5, q = Raw.cuflash_tensor_t(dtype = 1))
    @test problem.struct_size == sizeof(Raw.cuflash_problem_t)
    @test (problem.batch, problem.scale, problem.q.dtype, problem.kernel) == (2, 0.5f0, 1, C_NULL)
    @test Raw.cuflash_tensor_t().reserved == (0, 0, 0)
    @test_throws ArgumentError Raw.cuflash_problem_t(bacth = 2)
end

@testset "calls" begin
    info = Ref(Raw.cuflash_kernel_info_t())
    @test Raw.cuflash_kernel_info(0, info) == Raw.CUFLASH_SUCCESS
    @test !isempty(unsafe_string(info[].name))
    @test Raw.cuflash_kernel_info(-1, info) == Raw.CUFLASH_ERROR_INVALID_VALUE
    @test Raw.cuflash_set_default_device(Raw.CUFLASH_DEVICE_CPU) == 0
    q, o, lse = [3.0f0, 4.0f0], zeros(Float32, 2), zeros(Float32, 1)
    @test Raw.cuflash_attention_forward_f32(q, q, q, o, lse, 1, 1, 1, 2, 1, 0, C_NULL) == 0
    @test (o, lse) == (q, [25.0f0])
    @test Raw.cuflash_set_default_device(Raw.CUFLASH_DEVICE_CURRENT) in
          (0, Raw.CUFLASH_ERROR_NO_DEVICE, Raw.CUFLASH_ERROR_NOT_BUILT)
end

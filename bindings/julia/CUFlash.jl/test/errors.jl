# What must be refused is, with a message that names the argument, and the next good call works.

"The message of the error of this type that f throws."
function refused(f, type)
    try
        f()
    catch error
        error isa type || rethrow()
        return sprint(showerror, error)
    end
    return "was not refused"
end

@testset "errors" begin
    q, k = zeros(Float32, 8, 4, 2, 1), zeros(Float32, 8, 6, 2, 1)
    lse = zeros(Float32, 4, 2, 1)
    bad(type, word, f) = @test occursin(word, refused(f, type))

    bad(DimensionMismatch, "q: 3 axes", () -> attention(q[:, :, :, 1], k, k))
    bad(DimensionMismatch, "k: size", () -> attention(q, k[1:7, :, :, :], k))
    bad(DimensionMismatch, "v: size", () -> attention(q, k, q))
    bad(DimensionMismatch, "o: size", () -> attention!(k, q, k, k))
    bad(DimensionMismatch, "lse: size", () -> attention!(copy(q), q, k, k; lse = lse[:, :, 1]))
    bad(DimensionMismatch, "dk: size", () -> attention_backward!(q, q, k, q, q, k, k, q, lse))
    bad(DimensionMismatch, "lengths: size", () -> decode(q, k, k; lengths = Int32[1, 2]))
    bad(DimensionMismatch, "align: size", () -> attention(q, k, k; align = Int32[1, 2]))
    bad(DimensionMismatch, "parts: 4 axes", () -> merge_states(q, lse))

    bad(ArgumentError, "Float64", () -> attention(Float64.(q), Float64.(k), Float64.(k)))
    bad(ArgumentError, "lse: Float64", () -> attention!(copy(q), q, k, k; lse = Float64.(lse)))
    bad(ArgumentError, "lengths: Int64", () -> decode(q, k, k; lengths = [1]))
    bad(ArgumentError, "align: Int64", () -> attention(q, k, k; align = [1]))
    bad(ArgumentError, "align: :middle", () -> attention(q, k, k; align = :middle))
    bad(ArgumentError, "window", () -> attention(q, k, k; window = (1,)))
    bad(ArgumentError, "no memory", () -> decode(q, k, k; lengths = Int32(1):Int32(1)))
    bad(ArgumentError, "q: a stride of 4 along the channels",
        () -> attention(PermutedDimsArray(zeros(Float32, 4, 8, 2, 1), (2, 1, 3, 4)), k, k))
    bad(ArgumentError, "not contiguous",
        () -> decode(zeros(Float32, 8, 1, 1, 2), zeros(Float32, 8, 1, 1, 2),
                     zeros(Float32, 8, 1, 1, 2); lengths = view(zeros(Int32, 3), 1:2:3)))
    bad(ArgumentError, "lse: strides", () -> merge_states!(
        copy(q), zeros(Float32, 8, 4, 2, 1, 2), zeros(Float32, 4, 2, 1, 2);
        lse = PermutedDimsArray(zeros(Float32, 2, 4, 1), (2, 1, 3))))
    bad(ArgumentError, "operation: :sideways", () -> CUFlash.explain(:sideways, q, k, k))
    bad(ArgumentError, "device: :gpu", () -> CUFlash.Handle(:gpu))
    bad(ArgumentError, "device: -3", () -> CUFlash.Handle(-3))
    bad(ArgumentError, "NUL", () -> attention(q, k, k; kernel = "a\0b"))

    bad(CUFlash.CUFlashError, "problem.k", () -> attention(q, Float16.(k), Float16.(k)))
    bad(CUFlash.CUFlashError, "heads_q: 2 is not a multiple of heads_kv, 4",
        () -> attention(q, zeros(Float32, 8, 6, 4, 1), zeros(Float32, 8, 6, 4, 1)))
    bad(CUFlash.CUFlashError, "scale", () -> attention(q, k, k; scale = -1))
    bad(CUFlash.CUFlashError, "window_left", () -> attention(q, k, k; window = (-5, 0)))
    bad(CUFlash.CUFlashError, "CUFLASH_ERROR_ALIASING", () -> attention!(q, q, k, k))
    bad(CUFlash.CUFlashError, "nonsense", () -> attention(q, k, k; kernel = "nonsense"))
    bad(CUFlash.CUFlashError, "target_arch", () -> attention(q, k, k; target_arch = 90))
    bad(CUFlash.CUFlashError, "300", () -> attention((zeros(Float32, 300, 1, 1, 1) for _ in 1:3)...))
    bad(CUFlash.CUFlashError, "stride", () -> attention(view(q, :, 4:-1:1, :, :), k, k))
    error = try CUFlash.Handle(999) catch error; error end
    @test error isa CUFlash.CUFlashError && startswith(error.name, "CUFLASH_ERROR_")

    @test all(iszero, first(attention(q, k, k)))
end

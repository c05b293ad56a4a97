# What must be refused is, with a message that names the argument: what Julia alone can ask for. The calls
# that every language can make are in bad_input.jl.

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

    bad(DimensionMismatch, "align: size", () -> attention(q, k, k; align = Int32[1, 2]))
    bad(DimensionMismatch, "parts: 4 axes", () -> merge_states(q, lse))

    bad(ArgumentError, "align: Int64", () -> attention(q, k, k; align = [1]))
    bad(ArgumentError, "align: :middle", () -> attention(q, k, k; align = :middle))
    bad(ArgumentError, "window", () -> attention(q, k, k; window = (1,)))
    bad(ArgumentError, "no memory", () -> decode(q, k, k; lengths = Int32(1):Int32(1)))
    bad(ArgumentError, "not contiguous",
        () -> decode(zeros(Float32, 8, 1, 1, 2), zeros(Float32, 8, 1, 1, 2),
                     zeros(Float32, 8, 1, 1, 2); lengths = view(zeros(Int32, 3), 1:2:3)))
    bad(ArgumentError, "lse: strides", () -> merge_states!(
        copy(q), zeros(Float32, 8, 4, 2, 1, 2), zeros(Float32, 4, 2, 1, 2);
        lse = PermutedDimsArray(zeros(Float32, 2, 4, 1), (2, 1, 3))))
    bad(ArgumentError, "operation: :sideways", () -> CUFlash.explain(:sideways, q, k, k))
    bad(ArgumentError, "device: :gpu", () -> CUFlash.Handle(:gpu))
    bad(ArgumentError, "NUL", () -> attention(q, k, k; kernel = "a\0b"))

    @test all(iszero, first(attention(q, k, k)))
end

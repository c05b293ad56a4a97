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

@testset "errors of modifiers, sequences and gradients" begin
    q, k, lse = zeros(Float32, 8, 4, 2, 1), zeros(Float32, 8, 6, 2, 1), zeros(Float32, 4, 2, 1)
    z(dims...) = zeros(Float32, dims...)
    bad(type, word, f) = @test occursin(word, refused(f, type))
    attend(; keywords...) = () -> attention(q, k, k; keywords...)

    # Extents of 0 that the C API takes for a default.
    bad(DimensionMismatch, "k: no heads", () -> attention(q, z(8, 6, 0, 1), z(8, 6, 0, 1)))
    bad(DimensionMismatch, "v: no channels", () -> attention(q, k, z(0, 6, 2, 1)))
    bad(DimensionMismatch, "k: 0 entries", () -> decode(q, z(8, 6, 2, 0), z(8, 6, 2, 0)))

    bad(DimensionMismatch, "alibi_slopes: size (3,)", attend(alibi_slopes = z(3)))
    bad(DimensionMismatch, "alibi_slopes: size (2, 2)", attend(alibi_slopes = z(2, 2)))
    bad(DimensionMismatch, "sinks: size (2, 1)", attend(sinks = z(2, 1)))
    for dims in ((5,), (1, 4, 2, 1), (6, 3), (6, 4, 2, 2), (0,), (6, 4, 2, 1, 1))
        bad(DimensionMismatch, "the other arguments need (6, 4, 2, 1)", attend(bias = z(dims...)))
    end
    bad(ArgumentError, "bias: not contiguous", attend(bias = view(z(12), 1:2:11)))
    bad(ArgumentError, "bias: Float64", attend(bias = zeros(6)))
    bad(ArgumentError, "dropout_seed: Int64", attend(dropout_seed = [1]))
    bad(DimensionMismatch, "dropout_offset: 2 elements", attend(dropout_offset = UInt64[1, 2]))
    bad(CUFlash.CUFlashError, "dropout_p: 1.5", attend(dropout_p = 1.5))
    bad(CUFlash.CUFlashError, "softcap", attend(softcap = -1))
    bad(DimensionMismatch, "seqused_q: size (2,)", attend(seqused_q = Int32[1, 2]))
    bad(ArgumentError, "leftpad_k: Int64", attend(leftpad_k = [1]))
    bad(MethodError, "accumulate", attend(accumulate = true))
    bad(CUFlash.CUFlashError, "lse", () -> attention!(copy(q), q, k, k; accumulate = true))

    packed, ends = z(8, 2, 4), Int32[0, 4]
    varlen(offsets_q, offsets_k = ends; q = packed, keywords...) = () -> attention_varlen(
        q, packed, packed, offsets_q, offsets_k; max_len_q = 4, max_len_k = 4, keywords...)
    bad(DimensionMismatch, "cu_seqlens_q: empty", varlen(Int32[]))
    bad(DimensionMismatch, "cu_seqlens_k: size (2,)", varlen(Int32[0, 2, 4]))
    bad(ArgumentError, "cu_seqlens_q: Int64", varlen([0, 4]))
    bad(DimensionMismatch, "q: 4 axes", varlen(ends; q = q))
    bad(DimensionMismatch, "lse: 3 axes", () -> attention_varlen!(
        copy(packed), packed, packed, packed, ends, ends; max_len_q = 4, max_len_k = 4, lse = lse))
    bad(ArgumentError, "accumulate", () -> attention_varlen_backward(
        packed, packed, packed, packed, packed, z(4, 2), ends, ends; max_len_q = 4, max_len_k = 4,
        accumulate = true))

    backward(; keywords...) = () -> attention_backward(q, q, k, k, q, lse; keywords...)
    other = PermutedDimsArray(z(2, 4, 1), (2, 1, 3))
    bad(DimensionMismatch, "d_lse: size", backward(d_lse = z(3, 2, 1)))
    bad(ArgumentError, "d_lse: strides", backward(d_lse = other))
    bad(ArgumentError, "delta: strides", backward(delta = other))
    bad(ArgumentError, "known_delta: Float64", backward(known_delta = zeros(4, 2, 1)))
    bad(ArgumentError, "one of them", backward(delta = copy(lse), known_delta = lse))
    bad(ArgumentError, "d_bias: the call has no bias", backward(d_bias = z(6)))
    bad(ArgumentError, "d_bias: Float16", backward(bias = z(6), d_bias = zeros(Float16, 6)))
    bad(DimensionMismatch, "d_bias: size (6, 4)", backward(bias = z(6), d_bias = z(6, 4)))
    bad(DimensionMismatch, "d_sinks: size (3,)", backward(sinks = z(2), d_sinks = z(3)))

    weights(dims...; keywords...) = () -> attention_weights!(z(dims...), q, k, lse; keywords...)
    bad(DimensionMismatch, "weights: size", weights(6, 3, 2, 1))
    bad(DimensionMismatch, "weights: size", weights(6, 4, 2, 1; rows = Int32[1]))
    bad(ArgumentError, "rows: Int64", weights(6, 1, 2, 1; rows = [1]))
    bad(ArgumentError, "weights: Float16", () -> attention_weights!(zeros(Float16, 6, 4, 2, 1), q, k, lse))
end

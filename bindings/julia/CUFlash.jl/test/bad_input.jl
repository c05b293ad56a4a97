# The calls of tests/bad_input/table.tsv, which every language makes.

const TABLE = joinpath(@__DIR__, "..", "..", "..", "..", "tests", "bad_input", "table.tsv")

"The rows for Julia, and how many it cannot express. Those of the operation \"library\" need a process
each, which tests/python/test_bad_input.py starts."
function bad_input_table()
    rows, impossible = [], 0
    for line in eachline(TABLE)
        startswith(line, '#') && continue
        id, operation, _, statuses, words, cannot = split(line, '\t')
        if any(reason -> startswith(reason, "julia: "), split(cannot, " | "))
            impossible += 1
        elseif operation != "library"
            words = filter(!=("-"), split(words, ','))
            push!(rows, (id = id, statuses = split(statuses, '|'), words = words))
        end
    end
    return rows, impossible
end

"A small call that is right, with `o` not yet written."
good_call() = (q = numbers(Float32, 8, 5, 4, 2), k = numbers(Float32, 8, 7, 2, 2),
               v = numbers(Float32, 8, 7, 2, 2), o = fill(NaN32, 8, 5, 4, 2),
               lse = fill(NaN32, 5, 4, 2))

"An array whose memory, so it says, is on a GPU."
struct OnGpu <: AbstractArray{Float32, 4} end
Base.size(::OnGpu) = (8, 5, 4, 2)
CUFlash.place(::OnGpu) = :cuda

"The package takes workspace from the pool: a caller's is a matter of the raw layer."
function one_byte_short(c)
    handle = CUFlash.Handle(:cpu)
    tensor(x) = CUFlash.tensor("", x)
    fields = (batch = 2, heads_q = 4, heads_kv = 2, len_q = 5, len_k = 7, head_dim = 8,
              q = tensor(c.q), k = tensor(c.k), v = tensor(c.v), o = tensor(c.o))
    bytes = Ref{Csize_t}(0)
    CUFlash.check(Raw.cuflash_forward_workspace_size(
        handle, Ref(Raw.cuflash_problem_t(; fields...)), bytes))
    @assert bytes[] > 0
    memory = zeros(UInt8, bytes[] + 256)
    GC.@preserve c memory begin
        start = cld(UInt(pointer(memory)), 256) * 256
        CUFlash.check(Raw.cuflash_attention_forward(handle, Ref(Raw.cuflash_problem_t(;
            fields..., workspace = Ptr{Cvoid}(start), workspace_size = bytes[] - 1)), C_NULL))
    end
end

function freed_handle(c)
    handle = CUFlash.Handle(:cpu)
    close(handle)
    close(handle)
    attention!(c.o, c.q, c.k, c.v; handle = handle)
end

with_o(c; keywords...) = attention!(c.o, c.q, c.k, c.v; keywords...)
set_option(key, value) = CUFlash.set_option!(CUFlash.Handle(:cpu), key, value)
wide() = zeros(Float32, 577, 1, 1, 1)

append_to(c; keywords...) =
    append!(KVCache(c.o, copy(c.o)), c.q[:, 1:1, :, :], c.q[:, 1:1, :, :]; keywords...)

const BAD_CALLS = Dict(
    "dtype" => c -> attention!(Float64.(c.o), Float64.(c.q), Float64.(c.k), Float64.(c.v)),
    "dtype-of-k" => c -> attention!(c.o, c.q, Float16.(c.k), c.v),
    "dtype-of-o" => c -> attention!(Float16.(c.o), c.q, c.k, c.v),
    "dtype-of-lse" => c -> with_o(c; lse = Float64.(c.lse)),
    "dtype-of-lengths" => c -> decode!(c.o, c.q, c.k, c.v; lengths = [1, 2]),
    "device-unknown" => c -> CUFlash.Handle(999),
    "device-negative" => c -> CUFlash.Handle(-99),
    "device-of-memory" => c -> attention!(c.o, OnGpu(), c.k, c.v),
    "channels" => c -> attention!(c.o, PermutedDimsArray(permutedims(c.q, (2, 1, 3, 4)), (2, 1, 3, 4)),
                                  c.k, c.v),
    "stride-negative" => c -> attention!(c.o, c.q, view(c.k, :, 7:-1:1, :, :), c.v),
    "heads" => c -> attention!(c.o[:, :, 1:3, :], c.q[:, :, 1:3, :], c.k, c.v),
    "head-dim" => c -> attention(wide(), wide(), wide()),
    "rank" => c -> attention!(c.o, c.q[:, :, :, 1], c.k, c.v),
    "shape-of-k" => c -> attention!(c.o, c.q, c.k[:, :, :, 1:1], c.v),
    "shape-of-v" => c -> attention!(c.o, c.q, c.k, c.v[:, 1:3, :, :]),
    "shape-of-o" => c -> attention!(c.o[:, :, 1:2, :], c.q, c.k, c.v),
    "shape-of-lse" => c -> with_o(c; lse = c.lse[1:4, :, :]),
    "shape-of-dk" => c -> attention_backward!(similar(c.q), similar(c.k[:, :, 1:1, :]), similar(c.v),
                                              c.q, c.q, c.k, c.v, c.q, zeros(Float32, 5, 4, 2)),
    "shape-of-lengths" => c -> decode!(c.o, c.q, c.k, c.v; lengths = Int32[1]),
    "shape-of-lse-parts" => c -> merge_states!(c.o, reshape(c.q, 8, 5, 4, 2, 1), zeros(Float32, 4, 4, 2, 1)),
    "scale-negative" => c -> with_o(c; scale = -1),
    "scale-nan" => c -> with_o(c; scale = NaN),
    "window" => c -> with_o(c; window = (-5, 0)),
    "tree-mask" => c -> attention_backward(c.q, c.q, c.k, c.v, c.q, zeros(Float32, 5, 4, 2);
                                           tree_mask = ones(UInt32, 1)),
    "zero-of-floats" => c -> decode!(c.o, c.q, KVCache(c.k, c.v; k_zero = ones(Float32, 1))),
    "append-nowhere" => c -> append_to(c),
    "rotary-dim" => c -> append_to(c; cos = ones(Float32, 5, 9), sin = ones(Float32, 5, 9)),
    "splits" => c -> decode!(c.o, c.q, c.k, c.v; num_splits = 2000),
    "splits-too-wide" => c -> decode!(c.o, c.q, c.k, c.v; num_splits = 2^32 + 1),
    "kernel-unknown" => c -> with_o(c; kernel = "nonsense"),
    "kernel-refuses" => c -> with_o(c; kernel = "fwd_reference"),
    "option" => c -> set_option(Raw.CUFLASH_OPTION_CPU_THREADS, -1),
    "option-unknown" => c -> set_option(99, 0),
    "arch-unknown" => c -> CUFlash.explain(:forward, c.q, c.k, c.v; target_arch = 12),
    "arch-of-a-call" => c -> with_o(c; target_arch = 90),
    "o-is-q" => c -> attention!(c.q, c.q, c.k, c.v),
    "dk-is-dv" => c -> (dk = similar(c.k); attention_backward!(
        similar(c.q), dk, dk, c.q, c.q, c.k, c.v, copy(c.q), zeros(Float32, 5, 4, 2))),
    "workspace-too-small" => one_byte_short,
    "handle-freed" => freed_handle,
    "handle-of-another-type" => c -> with_o(c; handle = 5),
    "no-array" => c -> attention!(c.o, c.q, 5, c.v),
)

"Status, or nothing where the error is one of Julia's own, and the text of what f throws."
function thrown(f)
    try
        f()
    catch error
        error isa CUFlash.CUFlashError || error isa ArgumentError || error isa DimensionMismatch ||
            error isa InexactError || rethrow()
        status = error isa CUFlash.CUFlashError ? replace(error.name, "CUFLASH_ERROR_" => "") : nothing
        return status, sprint(showerror, error)
    end
    return nothing, "was not refused"
end

@testset "bad input" begin
    rows, impossible = bad_input_table()
    @test Set(row.id for row in rows) == keys(BAD_CALLS)
    @testset "$(row.id)" for row in rows
        call = good_call()
        q = copy(call.q)
        status, text = thrown(() -> BAD_CALLS[row.id](call))
        @test status === nothing || status in row.statuses
        @test text != "was not refused"
        for word in row.words
            @test any(either -> occursin(either, text), split(word, '|'))
        end
        @test all(isnan, call.o) && all(isnan, call.lse) && call.q == q
        good = good_call()
        attention!(good.o, good.q, good.k, good.v)
        @test good.o ≈ first(reference(good.q, good.k, good.v))
    end
    println("$(length(rows)) calls refused, $impossible cannot be written in Julia")
end

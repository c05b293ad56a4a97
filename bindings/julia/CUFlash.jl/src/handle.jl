"""
    CUFlash.Handle(device)

A device and options: `:cpu`, `:cuda` for the CUDA device that is current at each call, or a CUDA
ordinal. Any number of threads may use one; those that change it must be alone. It is freed with the
object, or by `close`.
"""
mutable struct Handle
    raw::Raw.cuflash_handle_t
    device::Union{Symbol, Int}

    function Handle(device::Union{Symbol, Integer})
        raw = Ref{Raw.cuflash_handle_t}(C_NULL)
        check(Raw.cuflash_create(raw, ordinal(device)))
        return finalizer(close, new(raw[], device isa Symbol ? device : Int(device)))
    end
end

function ordinal(device::Symbol)
    device === :cpu && return Raw.CUFLASH_DEVICE_CPU
    device === :cuda && return Raw.CUFLASH_DEVICE_CURRENT
    throw(ArgumentError("device: :$device; :cpu, :cuda or a CUDA ordinal"))
end

function ordinal(device::Integer)
    device >= 0 || throw(ArgumentError("device: $device; :cpu, :cuda or a CUDA ordinal"))
    return device
end

"Frees a handle; a second time does nothing."
function Base.close(handle::Handle)
    handle.raw == C_NULL || Raw.cuflash_destroy(handle.raw)
    handle.raw = C_NULL
    return nothing
end

# A NULL handle would be the default device.
function Base.unsafe_convert(::Type{Ptr{Cvoid}}, handle::Handle)
    handle.raw == C_NULL && throw(ArgumentError("the handle is closed"))
    return handle.raw
end

"The kind of memory that calls through the handle need."
place(handle::Handle) = handle.device === :cpu ? :cpu : :cuda

"Changes an option of a handle, one of the `CUFlash.Raw.CUFLASH_OPTION_` constants."
set_option!(handle::Handle, key::Integer, value::Integer) =
    check(Raw.cuflash_set_option(handle, key, value))

"The value of an option of a handle."
function get_option(handle::Handle, key::Integer)
    value = Ref{Int64}(0)
    check(Raw.cuflash_get_option(handle, key, value))
    return value[]
end

"""
    CUFlash.set_kernel!(handle, name)

Forces a kernel or a family of kernels by name; "" lets the library choose again.
"""
set_kernel!(handle::Handle, name::AbstractString) = check(Raw.cuflash_set_kernel(handle, name))

const DEFAULT_HANDLES = Dict{Symbol, Handle}()

"The handle of calls that name none, by where their arrays are."
default_handle(place::Symbol) =
    lock(() -> get!(() -> Handle(place), DEFAULT_HANDLES, place), LOADING)

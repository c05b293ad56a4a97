# Finding the library, and what the generated declarations need.

"The number in the SONAME of the library that this package is for."
const ABI = 0
const SONAME = "libcuflash.so.$ABI"

const LOADED = Ref{Ptr{Cvoid}}(C_NULL)
const LOADING = ReentrantLock()

"Where the library is looked for. Whoever names one wants that one or an error."
function candidates()
    haskey(ENV, "CUFLASH_LIBRARY") && return [ENV["CUFLASH_LIBRARY"]]
    haskey(ENV, "CUFLASH_LIB_DIR") && return [joinpath(ENV["CUFLASH_LIB_DIR"], SONAME)]
    return [SONAME]
end

"The library, loaded at the first use: a package image may be older than the library."
function library()
    LOADED[] == C_NULL || return LOADED[]
    lock(LOADING) do
        LOADED[] == C_NULL && (LOADED[] = load())
        return LOADED[]
    end
end

function load()
    tried = String[]
    for name in candidates()
        # dlopen by itself would only answer with C_NULL where told not to throw.
        loaded = try
            dlopen(name)
        catch error
            push!(tried, sprint(showerror, error))
            continue
        end
        if dlsym(loaded, :cuflash_abi_version; throw_error = false) === nothing
            push!(tried, "$name: another library, without cuflash_abi_version")
            continue
        end
        check_version(loaded)
        return loaded
    end
    error("libcuflash not found; tried\n  ", join(tried, "\n  "), "\nInstall the package ",
          "libcuflash0, or set CUFLASH_LIBRARY to the library's path or CUFLASH_LIB_DIR to its ",
          "directory.")
end

"Refuses a library of another ABI, or older than the header behind the raw layer."
function check_version(loaded)
    abi = ccall(dlsym(loaded, :cuflash_abi_version), Int32, ())
    abi == ABI || error("$(dlpath(loaded)) has ABI $abi; this package is for ABI $ABI")
    found = version(loaded)
    needed = VersionNumber(Raw.CUFLASH_VERSION_MAJOR, Raw.CUFLASH_VERSION_MINOR)
    found >= needed || error("$(dlpath(loaded)) is version $found; this package needs ",
                             "$(needed.major).$(needed.minor) or newer")
    return nothing
end

"The library's version."
function version(loaded = library())
    parts = zeros(Int32, 3)
    GC.@preserve parts ccall(dlsym(loaded, :cuflash_version), Cvoid,
                             (Ptr{Int32}, Ptr{Int32}, Ptr{Int32}), pointer(parts, 1),
                             pointer(parts, 2), pointer(parts, 3))
    return VersionNumber(parts...)
end

"The file that was loaded."
library_path() = dlpath(library())

"Version, CUDA version, architectures and compiler of the library."
build_info() = unsafe_string(Raw.cuflash_build_info())

"""
    functional(show_reason = false)

Whether libcuflash was found and fits, so that calls can work: on the CPU anywhere, on a GPU where
there is one. `show_reason` prints why not.
"""
function functional(show_reason::Bool = false)
    try
        library()
        return true
    catch error
        error isa ErrorException || rethrow()
        show_reason && println(stderr, error.msg)
        return false
    end
end

"A function of the library. An older one serves all that it has."
function symbol(name::Symbol)
    address = dlsym(library(), name; throw_error = false)
    address === nothing && error("$(library_path()) is too old: it has no $name")
    return address
end

"""
A struct of the C API: the fields given, zero elsewhere, but struct_size where there is one. Made when
it is compiled, for the largest has some eighty fields.
"""
@generated function zeroed(::Type{T}, given::NamedTuple{names}) where {T, names}
    unknown = setdiff(names, fieldnames(T))
    isempty(unknown) || return :(throw(ArgumentError($("$T has no field $(first(unknown))"))))
    values = map(fieldnames(T), fieldtypes(T)) do name, type
        name in names && return :(convert($type, given.$name))
        name === :struct_size && return UInt32(sizeof(T))
        return :(zero_of($type))
    end
    return :(T($(values...)))
end

zero_of(::Type{T}) where {T <: Number} = zero(T)
zero_of(::Type{Ptr{T}}) where {T} = Ptr{T}(C_NULL)
zero_of(::Type{NTuple{N, T}}) where {N, T} = ntuple(_ -> zero(T), N)
zero_of(::Type{T}) where {T} = zeroed(T, NamedTuple())

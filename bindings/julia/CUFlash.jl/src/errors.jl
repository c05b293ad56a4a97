"""
A call that the library refused or that failed: its status, the status's name and a message that names
the argument, the value got and the values allowed.
"""
struct CUFlashError <: Exception
    status::Int32
    name::String
    message::String
end

Base.showerror(io::IO, error::CUFlashError) =
    print(io, error.name, " (", error.status, "): ", error.message)

"""
    CUFlash.check(status)

Throws a `CUFlashError` where the status is not 0. The message is the thread's, of its last call, so
nothing that could switch tasks may come between.
"""
function check(status::Integer)
    status == Raw.CUFLASH_SUCCESS && return nothing
    message = unsafe_string(Raw.cuflash_last_error())
    isempty(message) && (message = unsafe_string(Raw.cuflash_error_string(status)))
    throw(CUFlashError(status, unsafe_string(Raw.cuflash_status_name(status)), message))
end

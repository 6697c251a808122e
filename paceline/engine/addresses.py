"""Memory and files by address, for compiled functions: taking an array apart costs a microsecond a call."""

from numba import types
from numba.extending import intrinsic


def _pointer(element):
    @intrinsic
    def pointer(context, address):
        kind = types.CPointer(element)

        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return pointer


# of a file's descriptor, to an address so many bytes from a place in it: the bytes that were read
read_at = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
floats, ints, longs = (_pointer(kind) for kind in (types.float32, types.int32, types.int64))

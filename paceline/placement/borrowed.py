"""Arrays that compiled code uses without counting who has them."""

# mypy: ignore-errors
# (what extends Numba has no types)

from typing import Any

from numba.extending import intrinsic


@intrinsic
def borrowed(typing: Any, array: Any) -> Any:
    """The same array without a claim to its memory; the caller holds it. Numba counts references wherever a function
    is handed an array, which can take most of the time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(array)(context, builder, arguments[0])
        view.meminfo, view.parent = (x.type(None) for x in (view.meminfo, view.parent))
        return view._getvalue()

    return array(array), generate

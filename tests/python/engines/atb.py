"""Operators of the ATB library, which the emulation does not have."""


def needs_atb(call):
    """The call must end where the library is loaded."""
    try:
        call()
    except OSError as error:
        while error.__cause__:
            error = error.__cause__
        assert "libatb.so" in str(error), error
        return
    raise AssertionError("the call was taken")

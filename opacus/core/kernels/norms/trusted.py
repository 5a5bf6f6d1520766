"""When a norm by Gram matrices is believed; read by the reference and by Triton's kernels."""

# It is trusted where it is more than this share of the sizes of what was added up. Below it, terms
# of both signs have cancelled and their rounding errors are left.
TRUSTED = 2.0**-7

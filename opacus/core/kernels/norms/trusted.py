"""When a norm by Gram matrices is trusted; used by the reference and the Triton kernels."""

# It is trusted above this share of the sum of its terms' absolute values. Below it, terms of both
# signs have cancelled and rounding errors remain.
TRUSTED = 2.0**-7
# The same where products keep 11 bits of fp32.
TRUSTED_IN_TF32 = 2.0**-2

"""Sizes handled at once: every threshold of the core that trades memory for calls.

None of them changes a result. Each has its name here only; those of a kernel's tiles stand beside
the kernel.
"""

# Largest intermediate result, in elements (256 MB of fp32).
CHUNK_ELEMENTS = 1 << 26

# Elements of units' gradients that a head without logits forms at once; also of logits, of which
# a GPU takes as many for every 32 GiB that it has.
PART_ELEMENTS = 1 << 26

# Layers whose weight is at most so wide one way run with a weight for each sample, if a sample has
# at least so many tokens: a product for each takes no longer than one of all.
OWN_WEIGHT_WIDTH = 256
OWN_WEIGHT_TOKENS = 64

# --- norms ---

# Records of at most this many elements are stacked and handled in one batched
# call: launches, not arithmetic, are what small layers cost.
GROUP_ELEMENTS = 1 << 20
# Most elements that are stacked for one such call.
STACK_ELEMENTS = 1 << 24
# Layers that are held for the sum are measured when so many wait.
MEASURED_TOGETHER = 16
# Most layers whose Gram matrices are formed at once: in the kernel that sums their terms so many
# bits of an int32 say where inputs begin.
MOST_STACKED = 30
# Per-sample gradients up to this size are kept, where the norm takes them anyway; larger ones
# if they are at most this share of the layer's activations and backprops.
FORMED_ELEMENTS = 1 << 18
FORMED_SHARE = 0.5
# Tensors up to this size are copied into one, so that their norms are taken in one call.
SQUARED_ELEMENTS = 1 << 16
# Elements of gradients of rows that are formed at once, to be summed by unit.
UNIT_ROWS_ELEMENTS = 1 << 24

# Part of what tensors have of a device when the backward pass starts that records may take which
# wait for their norm.
DEFERRED_SHARE = 0.05

# --- sums ---

# Part of the memory that is free when the backward pass starts which may be kept for the sum.
FREE_MEMORY_SHARE = 0.8
# Part of the device's memory that stays free where blocks may run again to keep it so: what
# allocations in pieces cannot use, and what a step needs that was not foreseen.
FREE_MEMORY_MARGIN = 0.05
# Part of the device's memory that the stored gradients of a single sample may take.
STORED_SHARE = 0.5
# Smaller per-sample gradients are stored in the type in which they were formed.
ROUNDED_ELEMENTS = 1 << 12
# Smaller ones are not sent to host memory: a copy each way costs more than their room.
SENT_ELEMENTS = 1 << 14
# Uses of one layer wait for each other up to so many times the size of their result.
WAITING_SHARE = 1.0
# Columns of half-precision gradients that are widened at once, where there is no kernel.
WIDENED_ELEMENTS = 1 << 16
# Per-sample gradients up to this size are copied into one, where there is no kernel.
SUMMED_ELEMENTS = 1 << 14
# Elements of small sums that share their storage, free when none of them is used any more.
SHARED_ELEMENTS = 1 << 22
# Elements whose sums are formed, and reduced over ranks, together; a larger parameter alone.
BUCKET_ELEMENTS = 1 << 27
# Buckets whose reduction may run while the next one is filled.
BUCKETS_IN_FLIGHT = 2
# Parameters up to this size (biases, norms) go into buckets of their own, at the end.
LAST_BUCKET_ELEMENTS = 1 << 16

# --- isolation ---

# Most elements of gradients of outputs that are kept for a check.
KEPT_ELEMENTS = 1 << 28
# Inputs, and gradients of outputs, up to this size are copied where they are; larger gradients
# stay on the GPU if they are less than this share of what is free.
COPIED_ELEMENTS = 1 << 24
COPIED_SHARE = 1 / 16

# --- noise ---

# Elements of new tensors with noise that are made at once; the sums they replace go before more.
NOISE_ELEMENTS = 1 << 26

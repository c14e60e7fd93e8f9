"""The tile of a kernel: the tokens of a row in one program, and the warps that share them."""

# (largest vocabulary, tokens of a row in one program)
PART_BY_VOCABULARY = ((512, 512), (1024, 1024), (16384, 2048), (65536, 4096))
LONGEST_PART = 8192
# tokens per warp, and the most warps of a part
TOKENS_A_WARP = 1024
MOST_WARPS = 8
# parts of rows that a warp merges: two per thread
PAIRS_A_WARP = 64


def part_for(vocab: int) -> int:
    """Return the tokens of a row in one program, by the vocabulary alone."""
    for most, part in PART_BY_VOCABULARY:
        if vocab <= most:
            return part
    return LONGEST_PART


def warps_for(part: int) -> int:
    """Return the number of warps that share a part of a row."""
    return min(max(part // TOKENS_A_WARP, 1), MOST_WARPS)


def warps_merging(parts: int) -> int:
    """Return the number of warps that merge ``parts`` parts of a request's rows."""
    return min(max(parts // PAIRS_A_WARP, 1), MOST_WARPS)

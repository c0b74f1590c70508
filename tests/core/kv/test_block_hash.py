"""Keys of blocks, computed a second time from the description alone."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from baton.core.kv.block_hash import BlockHasher

FINGERPRINT = b"weights and all the rest"
tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def joined(*parts: bytes) -> bytes:
    out = b""
    for part in parts:
        out += len(part).to_bytes(8, "little") + part
    return out


def expected_keys(fingerprint: bytes, salt: bytes, private: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    """A SHA-256 chain over (parent, token ids as little-endian u32) whose root is (fingerprint, salt, private)."""
    parent = sha256(joined(b"baton.root.v1", fingerprint, salt, private)).digest()
    keys = []
    for begin in range(0, len(tokens) // block_size * block_size, block_size):
        body = b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + block_size])
        parent = sha256(parent + body).digest()
        keys.append(parent)
    return keys


@given(st.binary(max_size=40), st.binary(max_size=8), st.binary(max_size=8), tokens_of, st.integers(1, 8))
def test_keys_are_the_chain_that_is_described(fingerprint, salt, private, tokens, block_size):
    hasher, keys = BlockHasher(fingerprint, block_size), []
    hasher.extend(keys, hasher.root(salt, private), tokens, len(tokens) // block_size)
    assert keys == expected_keys(fingerprint, salt, private, tokens, block_size)


@given(tokens_of, st.integers(1, 8), st.lists(st.integers(0, 40), max_size=4))
def test_extending_bit_by_bit_gives_the_same_keys_and_never_touches_the_tokens(tokens, block_size, stops):
    hasher = BlockHasher(FINGERPRINT, block_size)
    root, full, keys = hasher.root(b""), len(tokens) // block_size, []
    before = list(tokens)
    for blocks in [*sorted(min(stop, full) for stop in stops), full, full]:
        hasher.extend(keys, root, tokens, blocks)
        assert len(keys) == blocks
    assert tokens == before
    assert keys == expected_keys(FINGERPRINT, b"", b"", tokens, block_size)


@given(tokens_of, tokens_of, st.integers(1, 8))
def test_equal_keys_mean_equal_tokens_from_the_beginning(one, other, block_size):
    hasher, keys = BlockHasher(FINGERPRINT, block_size), []
    for tokens in (one, other):
        keys.append([])
        hasher.extend(keys[-1], hasher.root(b""), tokens, len(tokens) // block_size)
    for place, (left, right) in enumerate(zip(*keys, strict=False)):
        until = (place + 1) * block_size
        assert (left == right) == (one[:until] == other[:until])


def test_same_block_after_another_beginning_has_another_key():
    hasher = BlockHasher(b"", 2)
    first, second = [], []
    hasher.extend(first, hasher.root(b""), [1, 2, 7, 8], 2)
    hasher.extend(second, hasher.root(b""), [3, 4, 7, 8], 2)
    assert first[1] != second[1]


def test_neighbouring_fields_do_not_run_into_each_other():
    hasher = BlockHasher(b"", 16)
    assert hasher.root(b"ab", b"c") != hasher.root(b"a", b"bc")
    assert BlockHasher(b"ab", 16).root(b"c") != BlockHasher(b"a", 16).root(b"bc")


def test_salt_and_private_split_the_name_space():
    hasher = BlockHasher(FINGERPRINT, 2)
    roots = [hasher.root(b""), hasher.root(b"x"), hasher.root(b"", b"x"), hasher.root(b"x", b"x"), hasher.root(b"y")]
    assert len({*roots}) == len(roots)
    keys = [hasher.key(root, [1, 2]) for root in roots]
    assert len({*keys}) == len(keys)


def test_extra_is_part_of_the_key():
    """An image's digest, say: same text, other image, other key."""
    hasher = BlockHasher(b"", 2)
    root = hasher.root(b"")
    assert len({hasher.key(root, [1, 2], extra) for extra in (b"", b"image 1", b"image 2")}) == 3


def test_extras_are_in_the_key_of_the_block_in_which_they_begin_and_of_all_after_it():
    hasher, tokens = BlockHasher(FINGERPRINT, 4), list(range(16))

    def keys_of(*extras):
        keys = []
        hasher.extend(keys, hasher.root(b""), tokens, 4, extras)
        return keys

    plain, image = keys_of(), keys_of((5, b"image"))
    assert plain[0] == image[0]
    assert not set(plain[1:]) & set(image[1:])
    two = keys_of((5, b"image"), (9, b"x"))
    others = [keys_of((6, b"image")), keys_of((5, b"other")), keys_of((5, b"im"), (6, b"age")), two]
    assert len({tuple(keys) for keys in (plain, image, *others)}) == 6
    assert two[:2] == image[:2]


def test_extras_make_the_same_keys_however_many_blocks_are_added_at_a_time():
    hasher, tokens, extras = BlockHasher(FINGERPRINT, 4), list(range(16)), ((1, b"a"), (7, b"b"), (8, b"c"))
    whole, by_one = [], []
    hasher.extend(whole, hasher.root(b""), tokens, 4, extras)
    for blocks in range(5):
        hasher.extend(by_one, hasher.root(b""), tokens, blocks, extras)
    assert whole == by_one
    assert whole[1] == hasher.key(whole[0], tokens[4:8], whole_extra(3, b"b"))


def whole_extra(place, digest):
    """Written out: length before content, the place in the block as four bytes."""
    return (4).to_bytes(8, "little") + place.to_bytes(4, "little") + len(digest).to_bytes(8, "little") + digest

"""The Transformer of 2017, whole: from the ids of the source and of the target to scores for the next token."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jax_impl.checks import InputError, check_batches, check_ids, check_sizes
from jax_impl.config import TransformerConfig
from jax_impl.decoder import Decoder, KeyValueCache
from jax_impl.encoder import Encoder
from jax_impl.layers import Dropout, Embedding, Linear
from jax_impl.masks import causal_mask, padding_mask
from jax_impl.operations import multiply
from jax_impl.positions import SinusoidalPositions, check_length


class Transformer(nnx.Module):
    """Encoder, decoder, and a projection to the tokens of the target.

    Embeddings are multiplied by `sqrt(d_model)` before the positions are added. Padding is hidden as a
    key everywhere, and a target token sees none after it. A source of padding alone gives NaN.

    Parameters, in this order: source_embedding, target_embedding, encoder, decoder, output. With `tied`
    the projection is the target's embedding, and there is no output.

    Args:
        n_source: number of tokens of the source's vocabulary.
        n_target: number of tokens of the target's.
        config: sizes and options.
        pad: the id that fills up short sequences, in both vocabularies.
        tied: whether the output projection is the target's embedding.

    Raises:
        InputError: a size is no positive whole number, or pad is outside a vocabulary.

    Source:
        Vaswani et al. 2017, sections 3.1, 3.4 and 3.5.
    """

    def __init__(
        self,
        n_source: int,
        n_target: int,
        config: TransformerConfig = TransformerConfig(),
        *,
        pad: int = 0,
        tied: bool = False,
        rngs: nnx.Rngs,
    ):
        check_sizes("Transformer", n_source=n_source, n_target=n_target)
        check_ids("Transformer", min(n_source, n_target), pad=pad)
        self.n_target = n_target
        self.d_model = config.d_model
        self.max_len = config.max_len
        self.pad = pad
        self.source_embedding = Embedding(n_source, config.d_model, rngs=rngs)
        self.target_embedding = Embedding(n_target, config.d_model, rngs=rngs)
        sinusoidal = config.positions == "sinusoidal"
        self.positions = SinusoidalPositions(config.d_model, config.max_len) if sinusoidal else None
        self.source_dropout = Dropout(config.p_drop, rngs=rngs)
        self.target_dropout = Dropout(config.p_drop, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.output = None if tied else Linear(config.d_model, n_target, rngs=rngs)

    def __call__(self, source: Int[Array, "n ls"], target: Int[Array, "n lt"]) -> Float[Array, "n lt v"]:
        """Score the next token at every position of the target.

        Args:
            source: ids, `(n, ls)`.
            target: ids, `(n, lt)`, as a rule beginning with a start token.

        Returns:
            Scores before any softmax, `(n, lt, n_target)`.

        Raises:
            InputError: rank, batch size, length, dtype or an id does not fit.
        """
        check_batches("Transformer", self.max_len, source=source, target=target)
        return self.decode(target, self.encode(source), padding_mask(source, self.pad))

    def encode(self, source: Int[Array, "n ls"]) -> Float[Array, "n ls e"]:
        """Run the encoder.

        Args:
            source: ids, `(n, ls)`.

        Returns:
            Its output, `(n, ls, d_model)`.

        Raises:
            InputError: rank, length, dtype or an id does not fit.
        """
        check_batches("Transformer", self.max_len, source=source)
        embedded = self.source_dropout(self.embed(self.source_embedding, source))
        return self.encoder(embedded, padding_mask(source, self.pad))

    def decode(
        self,
        target: Int[Array, "n lt"],
        memory: Float[Array, "n ls e"],
        memory_mask: Bool[Array, "n 1 1 ls"] | None = None,
    ) -> Float[Array, "n lt v"]:
        """Run the decoder and the projection.

        Args:
            target: ids, `(n, lt)`.
            memory: the encoder's output, `(n, ls, d_model)`.
            memory_mask: True hides, `(n, 1, 1, ls)`.

        Returns:
            Scores, `(n, lt, n_target)`.

        Raises:
            InputError: rank, length, dtype or an id does not fit.
        """
        check_batches("Transformer", self.max_len, target=target)
        length = target.shape[1]
        mask = padding_mask(target, self.pad) | causal_mask(length, length, memory)
        embedded = self.target_dropout(self.embed(self.target_embedding, target))
        return self.scores(self.decoder(embedded, memory, mask, memory_mask))

    def embed(self, embedding: Embedding, tokens: Int[Array, "n l"], offset: int | Int[Array, ""] = 0) -> Float[Array, "n l e"]:
        """Rows of an embedding times `sqrt(d_model)`, with their positions.

        Args:
            embedding: the source's or the target's.
            tokens: ids, `(n, l)`.
            offset: position of the first token.

        Returns:
            `(n, l, d_model)`.
        """
        embedded = multiply(embedding(tokens), math.sqrt(self.d_model))
        return embedded if self.positions is None else self.positions(embedded, offset)

    def scores(self, x: Float[Array, "n l e"]) -> Float[Array, "n l v"]:
        """Project the decoder's output to the target's tokens.

        Args:
            x: `(n, l, d_model)`.

        Returns:
            `(n, l, n_target)`.
        """
        return self.target_embedding.attend(x) if self.output is None else self.output(x)


def greedy_decode(
    model: Transformer,
    source: Int[Array, "n ls"],
    *,
    start: int,
    stop: int,
    max_new: int,
    use_cache: bool = True,
) -> Int[Array, "n lt"]:
    """Decode the likeliest token at each step.

    Args:
        model: in eval mode.
        source: ids, `(n, ls)`.
        start: the token that begins every target.
        stop: the token that ends one; padding follows it, as it follows padding that the model itself chose.
        max_new: number of tokens to decode.
        use_cache: whether keys and values of earlier tokens are kept, rather than computed again at each
            step: the same tokens, in time linear in max_new instead of quadratic.

    Returns:
        Ids, `(n, max_new + 1)`, the start token first.

    Raises:
        InputError: max_new is no positive whole number, or more than the model's max_len allows, start or stop
            is outside the target's vocabulary, start is the padding, or the source does not fit.
    """
    check_sizes("greedy_decode", max_new=max_new)
    check_ids("greedy_decode", model.n_target, start=start, stop=stop)
    if start == model.pad:
        raise InputError(f"greedy_decode: start must not be the padding, {model.pad}: nothing but padding would be decoded")
    check_length("greedy_decode", max_new, 0, model.max_len)
    memory, memory_mask = model.encode(source), padding_mask(source, model.pad)
    tokens = jnp.full((source.shape[0], max_new + 1), model.pad, source.dtype).at[:, 0].set(start)
    caches = model.decoder.start(memory, max_new) if use_cache else []
    for position in range(max_new):
        scores, caches = _next_scores(model, tokens, caches, jnp.asarray(position), memory, memory_mask)
        # Some models begin with the token that ends.
        ended = (position > 0) & ((tokens[:, position] == stop) | (tokens[:, position] == model.pad))
        chosen = jnp.where(ended, model.pad, scores.argmax(axis=-1)).astype(tokens.dtype)
        tokens = tokens.at[:, position + 1].set(chosen)
    return tokens


@nnx.jit
def _next_scores(
    model: Transformer,
    tokens: Int[Array, "n l"],
    caches: list[KeyValueCache],
    position: Int[Array, ""],
    memory: Float[Array, "n ls e"],
    memory_mask: Bool[Array, "n 1 1 ls"],
) -> tuple[Float[Array, "n v"], list[KeyValueCache]]:
    """The scores after one more token, by the caches if there are any. One program serves every position."""
    if not caches:
        return model.decode(tokens[:, :-1], memory, memory_mask)[:, position], caches
    max_new = tokens.shape[1] - 1
    hidden = padding_mask(tokens[:, :-1], model.pad) | causal_mask(1, max_new, memory, position)
    token = lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)
    x = model.embed(model.target_embedding, token, position)
    x, caches = model.decoder.step(x, caches, position, hidden, memory_mask)
    return model.scores(x)[:, 0], caches

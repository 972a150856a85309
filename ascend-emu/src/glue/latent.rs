//! Latent keys and values on their way into caches.

use super::argument::{Argument, Shape, refuse};
use super::call::{Work, work};
use super::model::normalise_by_root_mean_square;
use super::rotary::Rotation;
use super::view::{View, Views};
use crate::host_memory::{try_repeat, try_with_capacity};
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::{DType, Soc};

/// Elements of a fractal of the NZ layout.
const FRACTAL: usize = 16;

/// The layout of a cache in memory, and what positions name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CacheMode {
    /// Whether the cache consists of blocks that all sequences share.
    paged: bool,
    /// Whether a position names a block, for as many tokens as it holds, and not the slot of one token.
    by_block: bool,
    /// Whether a block has `[fractals of a row][tokens][elements of a fractal]`.
    fractal: bool,
}

impl CacheMode {
    fn new(operator: &str, name: &str) -> Outcome<Self> {
        let (paged, by_block, fractal) = match name {
            "Norm" => (false, false, false),
            "PA" | "PA_BNSD" => (true, false, false),
            "PA_NZ" => (true, false, true),
            "PA_BLK_BNSD" => (true, true, false),
            "PA_BLK_NZ" => (true, true, true),
            _ => {
                return Err(refuse(
                    operator,
                    "cacheModeOptional",
                    name,
                    "Norm, PA, PA_BNSD, PA_NZ, PA_BLK_BNSD, PA_BLK_NZ",
                ));
            }
        };
        Ok(CacheMode { paged, by_block, fractal })
    }
}

/// The checked sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    tokens: usize,
    /// Elements of a rotated key.
    rope: usize,
    /// Elements of a normalised latent.
    latent: usize,
    /// Tokens of a block, or of a sequence of a cache without blocks.
    block: usize,
}

/// Checks a cache of rows of `width` elements; returns the tokens of a block.
fn check_cache(cache: &Argument, mode: CacheMode, batch: usize, width: usize) -> Outcome<usize> {
    let shape = cache.shape();
    let &[first, second, third, last] = shape.as_slice() else {
        return Err(cache.refuse(cache.desc.shape, "4 dimensions"));
    };
    let (block, heads) = if mode.paged { (second, third) } else { (third, second) };
    if heads != 1 || last != width || first == 0 || block == 0 || (!mode.paged && first < batch) {
        let allowed = match mode.paged {
            true => format!("[blocks, tokens of a block, 1, {width}]"),
            false => format!("[{batch}, 1, tokens of the cache, {width}]"),
        };
        return Err(cache.refuse(cache.desc.shape, allowed));
    }
    if mode.paged && !block.is_multiple_of(16) {
        let allowed = "blocks of a multiple of 16 tokens";
        return Err(cache.refuse(cache.desc.shape, allowed));
    }
    if mode.fractal && !width.is_multiple_of(FRACTAL) {
        let allowed = "rows of a multiple of 16 elements";
        return Err(cache.refuse(cache.desc.shape, allowed));
    }
    if mode.fractal && !cache.desc.is_contiguous() {
        return Err(cache.refuse(cache.desc, "a contiguous tensor"));
    }
    Ok(block)
}

/// Refuses the arguments of quantised caches.
fn expect_plain(arguments: &[Option<Argument>]) -> Outcome {
    match arguments.iter().flatten().next() {
        Some(given) => Err(given.refuse(given.desc, "null: caches are not quantised by the emulation")),
        None => Ok(()),
    }
}

/// The part of a cache that a token of a sequence has; `None` for a position of -1, whose token is left out.
fn row_of(
    cache: &View,
    mode: CacheMode,
    sizes: &Sizes,
    positions: &[i64],
    [sequence, token]: [usize; 2],
) -> Result<Option<View>, String> {
    let Sizes { tokens, block, .. } = *sizes;
    let number = match mode.by_block {
        true => sequence * tokens.div_ceil(block) + token / block,
        false => sequence * tokens + token,
    };
    let position = positions[number];
    if position == -1 {
        return Ok(None);
    }
    let blocks = cache.shape()[0];
    let slots = if mode.paged { blocks * block } else { block };
    let slot = usize::try_from(position).ok().filter(|&slot| slot < slots);
    let slot = slot.ok_or_else(|| {
        format!("index: position {position} of token {token} of sequence {sequence} is not from -1 to {}", slots - 1)
    })?;
    let (part, place) = match (mode.paged, mode.by_block) {
        (true, true) => (slot / block, token % block),
        (true, false) => (slot / block, slot % block),
        _ => (sequence, slot),
    };
    Ok(Some(match (mode.fractal, mode.paged) {
        (true, _) => {
            let fractals = cache.shape()[3] / FRACTAL;
            let blocks = cache.packed(&[blocks, fractals, block, FRACTAL]);
            blocks.at(0, part).at(1, place)
        }
        (_, true) => cache.at(0, part).at(0, place),
        (_, false) => cache.at(0, part).at(1, place),
    }))
}

/// Divides the first elements of each token by their root mean square and multiplies them by `gamma`; rotates the
/// others, whose neighbours are pairs that are half a line apart afterwards. Each of both goes into a cache, at a
/// position for each token or for each block of tokens. With blocks, the outputs get them as well if asked to.
#[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
pub(super) fn normalise_rotate_and_cache(
    kv: Argument,
    gamma: Argument,
    cos: Argument,
    sin: Argument,
    index: Argument,
    keys: Argument,
    latents: Argument,
    key_scale: Option<Argument>,
    latent_scale: Option<Argument>,
    key_offset: Option<Argument>,
    latent_offset: Option<Argument>,
    epsilon: f64,
    mode: Option<String>,
    with_outputs: bool,
    keys_out: Argument,
    latents_out: Argument,
) -> Outcome<Work> {
    let mode = CacheMode::new(kv.operator, mode.as_deref().unwrap_or("Norm"))?;
    expect_plain(&[key_scale, latent_scale, key_offset, latent_offset])?;
    let shape = kv.shape();
    let &[batch, 1, tokens, whole] = shape.as_slice() else {
        return Err(kv.refuse(kv.desc.shape, "[sequences, 1, tokens, elements]"));
    };
    if kv.elements() == 0 {
        return Err(kv.refuse(kv.desc.shape, "at least one element"));
    }
    if !matches!(kv.dtype(), DType::Float16 | DType::Bf16) {
        return Err(kv.refuse(kv.dtype(), "FLOAT16, BF16"));
    }
    gamma.expect_rank(1)?;
    let latent = gamma.elements();
    let rope = whole.saturating_sub(latent);
    if latent == 0 || rope == 0 || !rope.is_multiple_of(2) {
        let allowed = format_args!("less than the {whole} elements of a token, with an even rest");
        return Err(gamma.refuse(gamma.desc.shape, allowed));
    }
    if context::machine().target.soc != Soc::Ascend950 && (latent, rope) != (512, 64) {
        let allowed = "512 elements that are normalised and 64 that are rotated";
        return Err(kv.refuse(format_args!("{latent} and {rope}"), allowed));
    }
    let factors = match cos.shape().get(2) {
        Some(1) => [batch, 1, 1, rope],
        _ => [batch, 1, tokens, rope],
    };
    for factor in [cos, sin] {
        factor.expect_shape(&factors)?;
    }
    let block = check_cache(&keys, mode, batch, rope)?;
    if check_cache(&latents, mode, batch, latent)? != block {
        let allowed = format_args!("{block} tokens in a block or sequence, as kCacheRef has");
        return Err(latents.refuse(latents.desc.shape, allowed));
    }
    let positions: Shape = match (mode.paged, mode.by_block) {
        (false, _) => [batch, tokens].into_iter().collect(),
        (true, false) => [batch * tokens].into_iter().collect(),
        (true, true) => [batch * tokens.div_ceil(block)].into_iter().collect(),
    };
    index.expect_shape(&positions)?;
    index.expect_dtype(DType::Int64)?;
    keys_out.expect_shape(&[batch, 1, tokens, rope])?;
    latents_out.expect_shape(&[batch, 1, tokens, latent])?;
    for tensor in [gamma, cos, sin, keys, latents, keys_out, latents_out] {
        tensor.expect_dtype(kv.dtype())?;
    }
    let sizes = Sizes { batch, tokens, rope, latent, block };
    work(move |views| {
        let (rotated, normalised) = rows(views, &sizes, [kv, gamma, cos, sin], epsilon)?;
        let positions = views.of(&index).read::<i64>()?;
        for (cache, rows, width) in [(keys, &rotated, rope), (latents, &normalised, latent)] {
            for (number, row) in rows.chunks(width).enumerate() {
                let place = [number / tokens, number % tokens];
                if let Some(part) = row_of(views.of(&cache), mode, &sizes, &positions, place)? {
                    part.write(row);
                    views.wrote_part(&cache, &part);
                }
            }
        }
        if with_outputs && mode.paged {
            for (out, rows) in [(keys_out, &rotated), (latents_out, &normalised)] {
                views.of(&out).write(rows);
                views.wrote_part(&out, views.of(&out));
            }
        }
        Ok(())
    })
}

/// The rotated and the normalised elements of all tokens.
fn rows(
    views: &Views,
    sizes: &Sizes,
    [kv, gamma, cos, sin]: [Argument; 4],
    epsilon: f64,
) -> Result<(Vec<f64>, Vec<f64>), String> {
    let Sizes { batch, tokens, rope, latent, .. } = *sizes;
    let whole = views.of(&kv).read::<f64>()?;
    let gamma = views.of(&gamma).read::<f64>()?;
    let factor = |argument: &Argument| {
        let all = views.of(argument).broadcast(&[batch, 1, tokens, rope]);
        all.read::<f64>()
    };
    let (cos, sin) = (factor(&cos)?, factor(&sin)?);
    let count = batch * tokens;
    let mut rotated = try_repeat(0.0, count * rope)?;
    let mut normalised = try_with_capacity(count * latent)?;
    let factors = cos.chunks(rope).zip(sin.chunks(rope));
    let lines = whole.chunks(latent + rope).zip(rotated.chunks_mut(rope));
    for ((line, to), (cos, sin)) in lines.zip(factors) {
        let (first, rest) = line.split_at(latent);
        let start = normalised.len();
        normalised.extend_from_slice(first);
        normalise_by_root_mean_square(&mut normalised[start..], &gamma, epsilon);
        Rotation::NeighboursApart.turn(rest, cos, sin, to);
    }
    Ok((rotated, normalised))
}

//! Rotary positions.

use super::argument::{Argument, refuse};
use super::call::{Work, work};
use super::reduce::expect_real;
use super::select::place_on;
use crate::host_memory::{try_repeat, try_with_capacity};
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::{DType, Soc};

/// The pairs of elements of a line that a rotation turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rotation {
    /// Elements half a line apart are a pair.
    Half,
    /// Neighbours are a pair.
    Neighbours,
    /// Neighbours are a pair, and are half a line apart in the output.
    NeighboursApart,
    /// Elements a quarter of a line apart are a pair, in each half of the line.
    Quarter,
}

impl Rotation {
    /// Turns the pairs of a line by angles, given by their cosines and sines for each place of the output.
    pub(super) fn turn(self, from: &[f64], cos: &[f64], sin: &[f64], to: &mut [f64]) {
        let half = from.len() / 2;
        for pair in 0..half {
            let ([a, b], [first, second]) = self.pair(pair, half);
            let [a, b] = [from[a], from[b]];
            to[first] = a * cos[first] - b * sin[first];
            to[second] = b * cos[second] + a * sin[second];
        }
    }

    /// The places of the first and of the second element of a pair in the input, and in the output.
    fn pair(self, pair: usize, half: usize) -> ([usize; 2], [usize; 2]) {
        let (apart, side_by_side) = ([pair, pair + half], [2 * pair, 2 * pair + 1]);
        match self {
            Rotation::Half => (apart, apart),
            Rotation::Neighbours => (side_by_side, side_by_side),
            Rotation::NeighboursApart => (side_by_side, apart),
            Rotation::Quarter => {
                let first = if pair < half / 2 { pair } else { pair + half / 2 };
                let near = [first, first + half / 2];
                (near, near)
            }
        }
    }
}

/// Rotates the pairs of elements of each line of the last axis by angles, given by their cosines and sines for each
/// place of the output.
pub(super) fn rotate(rotation: Rotation) -> impl Fn(Argument, Argument, Argument, Argument) -> Outcome<Work> {
    move |input, cos, sin, out| {
        let shape = input.shape();
        let width = shape.last().copied().unwrap_or(1);
        if !width.is_multiple_of(2) {
            return Err(input.refuse(input.desc.shape, "a last dimension that is even"));
        }
        out.expect_shape(&shape)?;
        for factor in [cos, sin] {
            factor.expect_broadcast(&shape)?;
        }
        for argument in [input, cos, sin, out] {
            expect_real(&argument)?;
        }
        work(move |views| {
            let whole = |argument: &Argument| views.of(argument).broadcast(&shape).read::<f64>();
            let (from, cos, sin) = (whole(&input)?, whole(&cos)?, whole(&sin)?);
            let mut turned = whole(&input)?;
            let width = width.max(1);
            let factors = cos.chunks(width).zip(sin.chunks(width));
            let lines = from.chunks(width).zip(turned.chunks_mut(width));
            for ((from, to), (cos, sin)) in lines.zip(factors) {
                rotation.turn(from, cos, sin, to);
            }
            views.of(&out).write(&turned);
            Ok(())
        })
    }
}

/// [`rotate`] by the number of its mode.
pub(super) fn rotate_by_mode(input: Argument, cos: Argument, sin: Argument, mode: i64, out: Argument) -> Outcome<Work> {
    let rotation = match mode {
        0 => Rotation::Half,
        1 => Rotation::Neighbours,
        _ => {
            return Err(refuse(input.operator, "mode", mode, "0 (halves), 1 (neighbours)"));
        }
    };
    rotate(rotation)(input, cos, sin, out)
}

/// Rotates queries and keys in place, in the layout that a number names. `cos` and `sin` have one head.
pub(super) fn rotate_in_place(
    query: Argument,
    key: Argument,
    cos: Argument,
    sin: Argument,
    layout: i64,
    mode: Option<String>,
) -> Outcome<Work> {
    let is_950 = context::machine().target.soc == Soc::Ascend950;
    let operator = query.operator;
    // The number of axes, and the axis of heads.
    let (rank, heads) = match (layout, is_950) {
        (1, _) => (4, 2),
        (2, true) => (4, 2),
        (3, true) => (4, 1),
        (4, _) => (3, 1),
        _ => {
            let allowed = match is_950 {
                true => "1 (BSND), 2 (SBND), 3 (BNSD), 4 (TND)",
                false => "1 (BSND), 4 (TND)",
            };
            return Err(refuse(operator, "layout", layout, allowed));
        }
    };
    let mode = mode.as_deref().unwrap_or("half");
    let rotation = match (mode, is_950) {
        ("half", _) => Rotation::Half,
        ("interleave", true) => Rotation::Neighbours,
        ("quarter", true) => Rotation::Quarter,
        _ => {
            let allowed = match is_950 {
                true => "half, interleave, quarter",
                false => "half",
            };
            return Err(refuse(operator, "rotaryMode", mode, allowed));
        }
    };
    query.expect_rank(rank)?;
    let shape = query.shape();
    let width = shape[rank - 1];
    if !is_950 && ![64, 128].contains(&width) {
        return Err(query.refuse(query.desc.shape, "a last dimension of 64 or 128"));
    }
    let parts = if rotation == Rotation::Quarter { 4 } else { 2 };
    if !width.is_multiple_of(parts) {
        let allowed = format_args!("a last dimension that is a multiple of {parts}");
        return Err(query.refuse(query.desc.shape, allowed));
    }
    expect_real(&query)?;
    let mut of_keys = shape.clone();
    of_keys[heads] = key.shape().get(heads).copied().unwrap_or(1);
    key.expect_shape(&of_keys)?;
    let mut of_factors = shape.clone();
    of_factors[heads] = 1;
    for factor in [cos, sin] {
        factor.expect_shape(&of_factors)?;
    }
    for tensor in [key, cos, sin] {
        tensor.expect_dtype(query.dtype())?;
    }
    work(move |views| {
        let width = width.max(1);
        for target in [query, key] {
            let shape = target.shape();
            let whole = |argument: &Argument| views.of(argument).broadcast(&shape).read::<f64>();
            let (from, cos, sin) = (whole(&target)?, whole(&cos)?, whole(&sin)?);
            let mut turned = try_repeat(0.0, from.len())?;
            let factors = cos.chunks(width).zip(sin.chunks(width));
            let lines = from.chunks(width).zip(turned.chunks_mut(width));
            for ((from, to), (cos, sin)) in lines.zip(factors) {
                rotation.turn(from, cos, sin, to);
            }
            views.of(&target).write(&turned);
        }
        Ok(())
    })
}

/// Rotates the first elements of each head of queries and keys by the angles of its token, whose cosines and then
/// sines are a row of a table at the token's position. With sections, a token has three positions, and each section of
/// the angles is that of one of them.
#[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
pub(super) fn rotate_by_table(
    positions: Argument,
    query: Argument,
    key: Argument,
    table: Argument,
    sections: Vec<i64>,
    head_size: i64,
    neox: bool,
    query_out: Argument,
    key_out: Argument,
) -> Outcome<Work> {
    let operator = query.operator;
    for tensor in [query, key, table] {
        tensor.expect_rank(2)?;
        expect_real(&tensor)?;
        tensor.expect_dtype(query.dtype())?;
    }
    let (tokens, rotated) = (query.shape()[0], table.shape()[1]);
    let unit = if query.dtype() == DType::Float { 16 } else { 32 };
    let head = usize::try_from(head_size).unwrap_or(0);
    if head == 0 || !head.is_multiple_of(unit) {
        let allowed = format_args!("a multiple of {unit}");
        return Err(refuse(operator, "headSize", head_size, allowed));
    }
    if rotated == 0 || rotated > head || !rotated.is_multiple_of(unit) {
        return Err(
            table.refuse(table.desc.shape, format_args!("rows of at most {head} elements, a multiple of {unit}"))
        );
    }
    for (input, out) in [(query, query_out), (key, key_out)] {
        let shape = input.shape();
        if shape[0] != tokens || !shape[1].is_multiple_of(head) {
            return Err(input.refuse(input.desc.shape, format_args!("{tokens} tokens of heads of {head} elements")));
        }
        out.expect_shape(&shape)?;
        out.expect_dtype(input.dtype())?;
    }
    let half = rotated / 2;
    // The position of a token that each pair has its angle of.
    let mut sources =
        try_repeat(0_usize, half).map_err(|why| refuse(operator, "cosSinCache", why, "a table that fits"))?;
    let several = sections.first().is_some_and(|&size| size > 0);
    if several {
        let sizes: Option<Vec<usize>> = sections.iter().map(|&size| usize::try_from(size).ok()).collect();
        let sizes = sizes.filter(|sizes| {
            sizes.len() == 3 && sizes.iter().fold(0, |sum: usize, &size| sum.saturating_add(size)) == half
        });
        let Some(sizes) = sizes else {
            return Err(refuse(
                operator,
                "mropeSection",
                format_args!("{sections:?}"),
                format_args!("three sizes, {half} in sum"),
            ));
        };
        let each = sizes.iter().enumerate();
        let each = each.flat_map(|(position, &size)| std::iter::repeat_n(position, size));
        sources.iter_mut().zip(each).for_each(|(source, position)| *source = position);
        positions.expect_shape(&[3, tokens])?;
    } else {
        positions.expect_shape(&[tokens])?;
    }
    positions.expect_dtype(DType::Int64)?;
    let rotation = match neox {
        true => Rotation::Half,
        false => Rotation::Neighbours,
    };
    work(move |views| {
        let places = views.of(&positions).read::<i64>()?;
        let (rows, size) = (views.of(&table).read::<f64>()?, table.shape()[0]);
        let mut from = [views.of(&query).read::<f64>()?, views.of(&key).read::<f64>()?];
        let widths = [query.shape()[1], key.shape()[1]];
        let (mut cos, mut sin) = (try_repeat(0.0, rotated)?, try_repeat(0.0, rotated)?);
        let mut line = try_with_capacity(rotated)?;
        for token in 0..tokens {
            for (pair, source) in sources.iter().enumerate() {
                let place = place_on(&positions, 0, places[source * tokens + token], size)?;
                let row = &rows[place * rotated..][..rotated];
                let (_, to) = rotation.pair(pair, half);
                for to in to {
                    (cos[to], sin[to]) = (row[pair], row[half + pair]);
                }
            }
            for (values, width) in from.iter_mut().zip(widths) {
                for head in values[token * width..][..width].chunks_mut(head) {
                    line.clear();
                    line.extend_from_slice(&head[..rotated]);
                    rotation.turn(&line, &cos, &sin, &mut head[..rotated]);
                }
            }
        }
        views.of(&query_out).write(&from[0]);
        views.of(&key_out).write(&from[1]);
        Ok(())
    })
}

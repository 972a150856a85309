//! Quantising latent keys into rows of one byte an element.

use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_spec::ops::kv_quant_sparse_flash_attention::QuantisedRow;
use ascend_spec::ops::sparse_flash_attention::SparseFlashProblem;

use crate::error::{Error, Result};
use crate::memory::{Element, as_bytes, room};
use crate::tensor::Number;

/// An element of a quantised row: `i8`, and on Ascend 950 also [`Float8E4M3Fn`] and [`HiFloat8`].
pub trait RowElement: Element {
    /// The largest magnitude that [`quantised_rows`] gives an element. Of HIFLOAT8 it is the largest with 3 bits of
    /// mantissa.
    const LARGEST: f32;

    /// The element nearest to a number, ties to even, of HIFLOAT8 away from 0.
    #[doc(hidden)]
    fn nearest(number: f32) -> Self;

    /// The element with these bits.
    #[doc(hidden)]
    fn from_byte(byte: u8) -> Self;
}

impl RowElement for i8 {
    const LARGEST: f32 = 127.0;

    fn nearest(number: f32) -> Self {
        // The cast saturates.
        number.round_ties_even() as i8
    }

    fn from_byte(byte: u8) -> Self {
        byte.cast_signed()
    }
}

impl RowElement for Float8E4M3Fn {
    const LARGEST: f32 = 448.0;

    fn nearest(number: f32) -> Self {
        Float8E4M3Fn::from_f32(number)
    }

    fn from_byte(byte: u8) -> Self {
        Float8E4M3Fn::from_bits(byte)
    }
}

impl RowElement for HiFloat8 {
    const LARGEST: f32 = 15.0;

    fn nearest(number: f32) -> Self {
        HiFloat8::from_f32(number)
    }

    fn from_byte(byte: u8) -> Self {
        HiFloat8::from_bits(byte)
    }
}

/// Quantises latent keys, 512 elements each, and joins them with their rotary parts, 64 elements each, into rows of 656
/// elements for the key of a [`KvQuantSparseFlashAttention`](super::KvQuantSparseFlashAttention) with queries of type
/// `T`. A row holds the rotary part as bytes of `T`: queries of the other half would read other numbers there, and
/// nothing in the tensor of rows tells them apart.
///
/// Each 128 elements of a latent have a scale: their largest magnitude over [`RowElement::LARGEST`], rounded to single
/// precision, and 0 for zeros. An element is the nearest to its number over the scale, ties to even, of HIFLOAT8 away
/// from 0. The rotary part is stored as it is.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for other elements than `f16` and `bf16`, for numbers that are not
/// finite, for parts of keys, and for another number of rotary parts than of latents.
pub fn quantised_rows<T: Number, Q: RowElement>(latents: &[T], ropes: &[T]) -> Result<Vec<Q>> {
    if !T::DTYPE.is_half() {
        let fix = "convert latents and rotary parts";
        return Err(Error::invalid("latents and ropes", T::DTYPE, "FLOAT16 or BF16").fix(fix));
    }
    let (of_latents, parts) = latents.as_chunks::<{ SparseFlashProblem::DIM }>();
    let (of_ropes, rope_parts) = ropes.as_chunks::<{ SparseFlashProblem::ROPE_DIM }>();
    let whole = parts.is_empty() && rope_parts.is_empty();
    if !whole || of_latents.len() != of_ropes.len() {
        let given = format_args!("{} elements and {} rotary ones", latents.len(), ropes.len());
        return Err(Error::invalid("latents and ropes", given, "512 elements and 64 rotary ones of each key")
            .fix("pass whole keys, and the rotary part of each"));
    }
    finite("latents", latents)?;
    finite("ropes", ropes)?;
    let mut rows = room(of_latents.len().saturating_mul(QuantisedRow::BYTES))?;
    for (latent, rope) in of_latents.iter().zip(of_ropes) {
        let mut scales = [0f32; SparseFlashProblem::DIM / QuantisedRow::TILE];
        for (tile, scale) in latent.chunks(QuantisedRow::TILE).zip(&mut scales) {
            let numbers = tile.iter().map(|element| element.to_f64() as f32);
            *scale = numbers.clone().fold(0.0, |largest: f32, number| largest.max(number.abs())) / Q::LARGEST;
            let divisor = if *scale > 0.0 { *scale } else { 1.0 };
            rows.extend(numbers.map(|number| Q::nearest(number / divisor)));
        }
        let raw = as_bytes(rope).iter().chain(as_bytes(&scales));
        rows.extend(raw.map(|&byte| Q::from_byte(byte)));
    }
    Ok(rows)
}

/// Refuses numbers that are not finite.
fn finite<T: Number>(name: &'static str, elements: &[T]) -> Result<()> {
    match elements.iter().map(|element| element.to_f64()).find(|number| !number.is_finite()) {
        Some(number) => Err(Error::invalid(name, number, "finite numbers").fix("find out where the model overflows")),
        None => Ok(()),
    }
}

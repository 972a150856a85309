//! Packing latent keys into rows of one byte an element.

use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_spec::ops::kv_quant_sparse_flash_attention::PackedRow;
use ascend_spec::ops::sparse_flash_attention::SparseFlashProblem;

use crate::error::{Error, Result};
use crate::memory::{Element, as_bytes, room};
use crate::tensor::Number;

/// An element of a packed row: `i8`, and on Ascend 950 also [`Float8E4M3Fn`] and [`HiFloat8`].
pub trait RowElement: Element {
    /// The largest magnitude that [`packed_rows`] gives an element. Of HIFLOAT8 it is the largest with 3 bits of
    /// mantissa.
    const LARGEST: f32;

    /// The element nearest to a number, ties to even, of HIFLOAT8 away from 0.
    fn nearest(number: f32) -> Self;

    /// The element with these bits.
    fn of_byte(byte: u8) -> Self;
}

impl RowElement for i8 {
    const LARGEST: f32 = 127.0;

    fn nearest(number: f32) -> Self {
        // The cast saturates.
        number.round_ties_even() as i8
    }

    fn of_byte(byte: u8) -> Self {
        byte.cast_signed()
    }
}

impl RowElement for Float8E4M3Fn {
    const LARGEST: f32 = 448.0;

    fn nearest(number: f32) -> Self {
        Float8E4M3Fn::from_f32(number)
    }

    fn of_byte(byte: u8) -> Self {
        Float8E4M3Fn::from_bits(byte)
    }
}

impl RowElement for HiFloat8 {
    const LARGEST: f32 = 15.0;

    fn nearest(number: f32) -> Self {
        HiFloat8::from_f32(number)
    }

    fn of_byte(byte: u8) -> Self {
        HiFloat8::from_bits(byte)
    }
}

/// Quantises latent keys, 512 elements each, and packs them with their rotary parts, 64 elements each, into rows of 656
/// elements for the key of a [`KvQuantSparseFlashAttention`](super::KvQuantSparseFlashAttention) with queries of type
/// `T`.
///
/// Each 128 elements of a latent have a scale: their largest magnitude over [`RowElement::LARGEST`], rounded to single
/// precision, and 0 for zeros. An element is [nearest](RowElement::nearest) to its number over the scale. The rotary
/// part is stored as it is.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for other elements than `f16` and `bf16`, for numbers that are not
/// finite, for parts of keys, and for another number of rotary parts than of latents.
pub fn packed_rows<T: Number, Q: RowElement>(latents: &[T], ropes: &[T]) -> Result<Vec<Q>> {
    if !T::DTYPE.is_half() {
        return Err(Error::invalid("latents", T::DTYPE, "FLOAT16 or BF16").fix("convert latents and rotary parts"));
    }
    let (of_latents, parts) = latents.as_chunks::<{ SparseFlashProblem::DIM }>();
    let (of_ropes, rope_parts) = ropes.as_chunks::<{ SparseFlashProblem::ROPE_DIM }>();
    let whole = parts.is_empty() && rope_parts.is_empty();
    if !whole || of_latents.len() != of_ropes.len() {
        let given = format_args!("{} elements and {} rotary ones", latents.len(), ropes.len());
        return Err(Error::invalid("latents", given, "512 elements and 64 rotary ones of each key")
            .fix("pass whole keys, and the rotary part of each"));
    }
    let mut rows = room(of_latents.len().saturating_mul(PackedRow::BYTES))?;
    for (latent, rope) in of_latents.iter().zip(of_ropes) {
        let mut scales = [0f32; SparseFlashProblem::DIM / PackedRow::TILE];
        for (tile, scale) in latent.chunks(PackedRow::TILE).zip(&mut scales) {
            let numbers = tile.iter().map(|element| element.to_f64() as f32);
            if let Some(number) = numbers.clone().find(|number| !number.is_finite()) {
                return Err(
                    Error::invalid("latents", number, "finite numbers").fix("find out where the model overflows")
                );
            }
            *scale = numbers.clone().fold(0.0, |largest: f32, number| largest.max(number.abs())) / Q::LARGEST;
            let divisor = if *scale > 0.0 { *scale } else { 1.0 };
            rows.extend(numbers.map(|number| Q::nearest(number / divisor)));
        }
        let raw = as_bytes(rope).iter().chain(as_bytes(&scales));
        rows.extend(raw.map(|&byte| Q::of_byte(byte)));
    }
    Ok(rows)
}

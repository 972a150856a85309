//! Absorbed queries of latent attention, quantised on the host.

use ascend_attention::{DType, Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::rules;

use super::latent_scale::LatentScale;
use super::quantised_type::{QuantisedType, QueryType};
use super::rows_on_host::host_numbers;
use super::token_quantiser::QuantisedTokens;

/// The least scale of a head: numbers for which a smaller one would do add nothing to the scores, and rotary parts
/// divided by it are still numbers of BF16.
const LEAST_SCALE: f32 = 1e-20;

/// Waits for a stream and quantises each row and head of absorbed queries `[tokens, N, D]`: its largest number becomes
/// the largest of the type, or 15 as HIFLOAT8. Returns the stored numbers, their scales `[tokens, N]`, and the rotary
/// parts `[tokens, N, Dr]` divided by both scales, those of the query and of the latents: the operator multiplies the
/// sum of both products by them.
///
/// A head with a number that is not finite gets a scale that is NaN, and its attention is NaN.
///
/// # Errors
/// [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for rotary parts that are too large once they are divided.
pub(crate) fn quantise_latent_queries<T: Element>(
    stream: &Stream,
    stored: QuantisedType,
    (query, query_rope): (&Tensor<T>, &Tensor<T>),
    latents: LatentScale,
) -> Result<(Tensor<i8>, Tensor<f32>, Tensor<T>)> {
    let (&[tokens, heads, dim], &[rope_tokens, rope_heads, rope_dim]) = (query.shape(), query_rope.shape()) else {
        return Err(not_alike(query, query_rope));
    };
    if [rope_tokens, rope_heads] != [tokens, heads] {
        return Err(not_alike(query, query_rope));
    }
    let [numbers, mut ropes] = [host_numbers(stream, query)?, host_numbers(stream, query_rope)?];
    let largest = stored.largest_of_token().unwrap_or(stored.calibrated());
    let mut quantised = QuantisedTokens::quantise((stored, largest), &numbers, dim, |scale| scale.max(LEAST_SCALE));
    for (scale, numbers) in quantised.scales.iter_mut().zip(numbers.chunks(dim.max(1))) {
        if !numbers.iter().all(|number| number.is_finite()) {
            *scale = f32::NAN;
        }
    }
    let of_ropes = QueryType::of::<T>()?;
    for (row, (scale, rope)) in quantised.scales.iter().zip(ropes.chunks_mut(rope_dim.max(1))).enumerate() {
        let both = f64::from(*scale) * f64::from(latents.to_f32());
        for x in rope {
            let divided = (f64::from(*x) / both) as f32;
            if x.is_finite() && of_ropes.rounded(divided).is_infinite() {
                let (token, head) = (row / heads.max(1), row % heads.max(1));
                return Err(Violation::new(
                    &rules::QUANTISED_SCALE,
                    format_args!(
                        "a rotary part {x} of head {head} of row {token}, divided by {both:e}, the scales of the \
                         head and of the latents"
                    ),
                    format_args!("rotary parts that are numbers of {} once they are divided", T::DTYPE),
                    match T::DTYPE {
                        DType::Bf16 => {
                            "check the absorbed projection: the head's numbers are far smaller than its rotary parts"
                        }
                        _ => {
                            "make the scale of the latents from a calibration (`LatentScale::covering`), or bring BF16"
                        }
                    },
                )
                .into());
            }
            *x = divided;
        }
    }
    Ok((
        stream.upload(&quantised.quantised, query.shape())?,
        stream.upload(&quantised.scales, [tokens, heads])?,
        of_ropes.upload(stream, &ropes, query_rope.shape())?.typed()?,
    ))
}

#[cold]
fn not_alike<T: Element>(query: &Tensor<T>, query_rope: &Tensor<T>) -> Error {
    let given = format_args!("{:?} beside rotary parts {:?}", query.shape(), query_rope.shape());
    Error::invalid("query", given, "[tokens, N, D] beside [tokens, N, 64]")
        .fix("bring the absorbed queries and the rotary parts of the same tokens and heads")
}

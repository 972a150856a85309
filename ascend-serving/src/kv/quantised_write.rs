//! New keys and values into a quantised paged cache.

use ascend_attention::attention::{Affine, Inputs, Quantisation};
use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::{AnyTensor, Device, Element, Output, Plan, Stream, Tensor};

use crate::error::{Error, Result};

use super::cache_shape::CacheShape;
use super::copied_writes::CopiedWrites;
use super::pool::BlockPool;
use super::quantised_by_group::GroupQuantiser;
use super::quantised_by_token::TokenQuantiser;
use super::quantised_layer::{LayerScales, QuantisedLayer, one_key_each};
use super::quantised_type::QuantisedType;
use super::slot_write::{SlotWrite, rows_have_slots};

/// A step's writes: each row becomes numbers of a byte, then goes to its slot.
#[derive(Debug)]
pub(super) struct QuantisedWrite {
    by: Quantisers,
    write: SlotWrite,
}

/// What makes integers, or other numbers of a byte, of rows.
#[derive(Debug)]
enum Quantisers {
    /// There is nothing but padding.
    Nothing,
    /// Of keys and of values.
    Channel(Box<[ChannelQuantiser; 2]>),
    Token(Box<TokenQuantiser>),
    Group(Box<GroupQuantiser>),
}

impl QuantisedWrite {
    /// Prepares the writing of rows into a layer of these blocks.
    pub(super) fn plan<T: Element>(
        blocks: (&BlockPool, &CacheShape),
        layer: &QuantisedLayer,
        stream: &Stream,
        slots: &[i32],
        rows: [&Tensor<T>; 2],
    ) -> Result<Self> {
        let device = stream.device();
        let empty = |rows: &Tensor<T>| Tensor::<i8>::empty(device, rows.shape());
        let [key, value] = rows;
        let integers = [empty(key)?, empty(value)?];
        let write = SlotWrite::plan(blocks, &layer.cache, stream, slots, integers.each_ref())?;
        let (pad, block_size) = (blocks.0.pad_policy(), blocks.0.block_size());
        let places = slots.iter().take(write.rows).map(|slot| {
            let place = usize::try_from(*slot).ok();
            place.filter(|_| !pad.is_padding(*slot, block_size))
        });
        let by = match (&layer.scales, write.rows) {
            (_, 0) => Quantisers::Nothing,
            (LayerScales::Channel { key: k, value: v }, rows) => {
                let [keys, values] = integers;
                let stored = layer.stored();
                Quantisers::Channel(Box::new([
                    ChannelQuantiser::plan(device, ("key", stored), rows, key, &k.inverses, keys)?,
                    ChannelQuantiser::plan(
                        device,
                        ("value", stored),
                        rows,
                        value,
                        &v.inverses,
                        values,
                    )?,
                ]))
            }
            (LayerScales::Token(_), rows) => {
                let scales = || Tensor::empty(device, [rows, 1, 1]);
                Quantisers::Token(Box::new(TokenQuantiser {
                    stored: layer.stored(),
                    rows,
                    integers,
                    scales: [scales()?, scales()?],
                    writes: CopiedWrites::new(places, block_size),
                }))
            }
            (LayerScales::Group(_), _) => {
                let places: Vec<_> = places.collect();
                let of = GroupQuantiser::new(device, integers, &places, block_size)?;
                Quantisers::Group(Box::new(of))
            }
        };
        Ok(Self { by, write })
    }

    /// Queues the writing of a layer.
    pub(super) fn queue<T: Element>(
        &self,
        shape: &CacheShape,
        layer: &QuantisedLayer,
        stream: &Stream,
        rows: [&Tensor<T>; 2],
    ) -> Result<()> {
        let [key, value] = rows;
        rows_have_slots(self.write.tokens, key, value)?;
        let integers = match (&self.by, &layer.scales) {
            (Quantisers::Nothing, _) => return Ok(()),
            (Quantisers::Channel(of), LayerScales::Channel { key: k, value: v }) => {
                let [keys, values] = &**of;
                [
                    keys.queue(stream, key, &k.inverses)?,
                    values.queue(stream, value, &v.inverses)?,
                ]
            }
            (Quantisers::Token(of), LayerScales::Token(scales)) => {
                of.queue(stream, rows, scales)?
            }
            (Quantisers::Group(of), LayerScales::Group(scales)) => {
                of.queue(shape, stream, rows, &layer.cache, scales)?
            }
            _ => {
                return Err(Error::invalid(
                    "write",
                    "a write with other scales",
                    "one that this cache has planned",
                ));
            }
        };
        self.write.queue(shape, &layer.cache, stream, integers)
    }
}

/// Rows as numbers of a byte, by scales that are the same for all of them.
///
/// The library has no operator that quantises and nothing else. Attention with a single key is the value of that key, and
/// FusedInferAttentionScore quantises what it computes: a call with a sequence for each row, whose query and key are zeros and
/// whose value is the row, gives `round(row / scale)`.
#[derive(Debug)]
struct ChannelQuantiser {
    argument: &'static str,
    stored: QuantisedType,
    plan: Plan,
    /// Rows up to the last that is written.
    rows: usize,
    /// Queries and keys of all rows, zeros.
    zeros: AnyTensor,
    /// The integers, or bits, of the shape of the rows, for one layer after the other.
    integers: Tensor<i8>,
}

impl ChannelQuantiser {
    fn plan<T: Element>(
        device: &Device,
        (argument, stored): (&'static str, QuantisedType),
        rows: usize,
        of: &Tensor<T>,
        inverses: &Tensor<f32>,
        integers: Tensor<i8>,
    ) -> Result<Self> {
        let [heads, _] = [0, 1].map(|axis| inverses.shape().get(axis).copied().unwrap_or(0));
        let of = one_row_each(argument, of, rows, inverses)?;
        let zeros = device.alloc_zeroed::<T>(of.len())?;
        let zeros: AnyTensor = Tensor::from_buffer(&zeros, of.shape())?.into();
        let inputs = Inputs::new(&zeros, &zeros, &of);
        let plan = one_key_each(heads)
            .out_dtype(stored.dtype())
            .plan_with(&inputs.quantisation(Quantisation::Output(Affine::scale(inverses))))?;
        Ok(Self {
            argument,
            stored,
            plan,
            rows,
            zeros,
            integers,
        })
    }

    /// Queues the quantisation of a layer's rows.
    fn queue<T: Element>(
        &self,
        stream: &Stream,
        of: &Tensor<T>,
        inverses: &Tensor<f32>,
    ) -> Result<&Tensor<i8>> {
        let of = one_row_each(self.argument, of, self.rows, inverses)?;
        let inputs = Inputs::new(&self.zeros, &self.zeros, &of);
        let inputs = inputs.quantisation(Quantisation::Output(Affine::scale(inverses)));
        let bytes = one_row_each(self.argument, &self.integers, self.rows, inverses)?;
        match self.stored {
            QuantisedType::Int8 => self.launch::<i8>(stream, &inputs, &bytes)?,
            QuantisedType::Float8E4M3Fn => self.launch::<Float8E4M3Fn>(stream, &inputs, &bytes)?,
            QuantisedType::HiFloat8 => self.launch::<HiFloat8>(stream, &inputs, &bytes)?,
        }
        Ok(&self.integers)
    }

    fn launch<Q: Element>(
        &self,
        stream: &Stream,
        inputs: &Inputs<'_>,
        bytes: &Tensor<i8>,
    ) -> Result<()> {
        let mut output = Output {
            attention: bytes.bits_as(Q::DTYPE)?.typed::<Q>()?,
            softmax_lse: None,
        };
        Ok(self.plan.launch_with_into(stream, inputs, &mut output)?)
    }
}

/// The first rows `[tokens, N, D]` as sequences of one row, `[rows, 1, N * D]`.
fn one_row_each<T: Element>(
    argument: &'static str,
    rows: &Tensor<T>,
    count: usize,
    inverses: &Tensor<f32>,
) -> Result<Tensor<T>> {
    if rows.shape().get(1..) != Some(inverses.shape()) {
        return Err(Error::invalid(
            argument,
            rows.desc(),
            format_args!(
                "[tokens, N, D] with {:?} heads and elements, as the scales have",
                inverses.shape()
            ),
        ));
    }
    Ok(rows
        .narrow(0, 0..count)?
        .reshape([count, 1, inverses.len()])?)
}

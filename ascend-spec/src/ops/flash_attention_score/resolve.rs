//! Resolution of a checked call into the problem that a kernel solves.

use super::bias::BiasForm;
use super::{Bias, FlashAttentionProblem, MaskKind, Sequence, SoftmaxOrder, Work};
use crate::attention_problem::{
    AttentionProblem, BiasTensor, ByteRange, Counts, Cuts, Dropout, Grid, KeyValue, MaskUse, Rows, SequenceLengths,
    SequenceTerms, Slopes, SmallTensor, SoftmaxOutputs, TensorRole, size,
};
use crate::{DType, MaskGeometry, TensorDesc, View, Violation};

/// A tensor whose elements are counted in row-major order: the tensor itself if it is contiguous, otherwise the
/// contiguous copy that the operator makes of it.
fn in_order(desc: &TensorDesc) -> TensorDesc {
    match desc.is_contiguous() {
        true => *desc,
        false => TensorDesc::packed(desc.dtype, desc.shape),
    }
}

/// Most sequences that one call may have, since they are resolved one by one. Calls of FusedInferAttentionScore have
/// fewer.
const MOST_BATCH: usize = 2 << 20;

impl<'a> FlashAttentionProblem<'a> {
    /// The problem that a kernel solves.
    ///
    /// Mask, bias, drop mask and softmax outputs are treated as contiguous: where the call's are not, the operator
    /// reads a contiguous copy, or copies what is written. The rows of a marked tail are one more sequence, which has
    /// no keys.
    ///
    /// # Errors
    /// [`UNSUPPORTED`](crate::UNSUPPORTED) for more than 2097152 sequences, which is more than the operator's
    /// documents promise, or for more than host memory can hold. Tensors of stride 0 are small however many
    /// sequences they have.
    pub fn attention(&self) -> Result<AttentionProblem<'a>, Violation> {
        let batch = match self.work {
            Work::Attend => self.lengths.batch(),
            Work::Fill => self.layout.batch_axis().map_or(1, |axis| self.out_size(axis)),
            Work::Nothing => 0,
        };
        if batch > MOST_BATCH {
            return Err(Violation::unsupported("more than 2097152 sequences"));
        }
        match self.work {
            Work::Attend => self.attend(),
            work => self.without_keys(work, batch),
        }
    }

    /// Size of an axis of the output.
    fn out_size(&self, axis: usize) -> usize {
        let out = self.call.attention_out.as_ref();
        let of_axis = out.and_then(|out| out.shape.get(axis).copied());
        of_axis.map_or(0, size)
    }

    /// A problem that has only the tokens of the call.
    fn blank(&self) -> AttentionProblem<'a> {
        AttentionProblem {
            tokens: (self.call.pre_tokens, self.call.next_tokens),
            ..AttentionProblem::blank(self.call.query.map_or(DType::Float, |query| query.dtype))
        }
    }

    fn attend(&self) -> Result<AttentionProblem<'a>, Violation> {
        let call = &self.call;
        // The rows of a marked tail are one more sequence.
        let mut sequences = listed(self.lengths.batch() + 1, self.sequences())?;
        sequences.extend(self.tail(sequences.last()));
        let terms = listed(sequences.len(), sequences.iter().map(|sequence| self.terms(sequence)))?;
        let is_packed = self.layout.is_packed();
        let lengths = |len: fn(&Sequence) -> usize| -> Result<SequenceLengths<'a>, Violation> {
            Ok(match is_packed {
                // Sums of the lengths are used, since the given ends may descend.
                true => {
                    let sums = running_sums(sequences.iter().map(len));
                    SequenceLengths::Ends(listed(sequences.len(), sums)?.into())
                }
                false => SequenceLengths::All,
            })
        };
        let (query_lengths, key_lengths) = (lengths(|sequence| sequence.q_len)?, lengths(|sequence| sequence.kv_len)?);
        let total = |lengths: &SequenceLengths<'_>, rows: usize| match lengths {
            SequenceLengths::Ends(ends) => ends.last().map_or(0, |&end| end as usize),
            _ => rows,
        };
        let query_rows = total(&query_lengths, size(self.q_rows));
        let key_rows = total(&key_lengths, size(self.kv_rows));
        let rows = |desc: &Option<TensorDesc>, dim: i64| self.rows(desc.as_ref(), dim);
        let rope = |desc: &Option<TensorDesc>| {
            let desc = desc.as_ref().filter(|_| self.rope_dim > 0)?;
            Some(self.rows(Some(desc), self.rope_dim))
        };
        Ok(AttentionProblem {
            work: Work::Attend,
            batch: sequences.len(),
            heads: size(self.heads),
            kv_heads: size(self.kv_heads),
            query_rows,
            key_rows,
            head_dim: size(self.head_dim),
            value_dim: size(self.value_dim),
            rope_dim: size(self.rope_dim),
            packed: is_packed,
            scale: call.scale,
            query_lengths,
            key_lengths,
            mode: self.mode,
            mask: match self.mask {
                MaskKind::None => MaskUse::None,
                MaskKind::Compressed => MaskUse::Compressed,
                MaskKind::Full(_) => MaskUse::OfSequences,
            },
            mask_described: call.mask().map(in_order).as_ref().and_then(ByteRange::described),
            zeroes_masked_rows: self.zeroes_masked_rows,
            query: rows(&call.query, self.head_dim),
            query_rope: rope(&call.query_rope),
            out: rows(&call.attention_out, self.value_dim),
            bias: self.bias_tensor(),
            slopes: self.slopes(),
            sink: call.sinks().map(|sink| {
                let head = sink.strides.first().copied().unwrap_or(0);
                by_head(TensorRole::Sink, sink, (0, head))
            }),
            dropout: call.drop_mask.as_ref().map(|mask| {
                let start = u64::try_from(in_order(mask).offset).unwrap_or(0);
                let end = start.saturating_add(self.drop_bits().div_ceil(8));
                Dropout { bytes: ByteRange { start, end }, keep_prob: call.keep_prob }
            }),
            softmax: Some(self.softmax(is_packed, size(self.heads))),
            terms,
            first: KeyValue {
                list_index: 0,
                batch: 0,
                key: rows(&call.key, self.head_dim),
                value: rows(&call.value, self.value_dim),
                key_rope: rope(&call.key_rope),
            },
            first_key_rows: key_rows,
            ..self.blank()
        })
    }

    /// The problem of a call whose outputs are filled with 0, or that has no outputs.
    fn without_keys(&self, work: Work, batch: usize) -> Result<AttentionProblem<'a>, Violation> {
        let call = &self.call;
        let heads = usize::try_from(call.num_heads).unwrap_or(0);
        let out = call.attention_out.as_ref();
        let rows = self.out_size(self.layout.row_axis());
        let last = self.out_size(self.layout.last_axis());
        let value_dim = match self.layout.is_hidden() {
            true => last.checked_div(heads).unwrap_or(0),
            false => last,
        };
        let order = match self.layout.is_packed() {
            true => SoftmaxOrder::SequenceBlocks,
            false => SoftmaxOrder::Batches,
        };
        let terms = (0..batch).map(|index| {
            let sequence = Sequence { index, q_len: rows, ..Sequence::default() };
            SequenceTerms {
                geometry: MaskGeometry::full(0, 0),
                mask: None,
                bias: None,
                key_offset: 0,
                dropped: None,
                softmax: order.rows(&sequence, heads),
            }
        });
        Ok(AttentionProblem {
            work,
            batch,
            heads,
            query_rows: rows,
            value_dim,
            packed: self.layout.is_packed(),
            query: self.rows(call.query.as_ref(), 0),
            out: self.rows(out, i64::try_from(value_dim).unwrap_or(i64::MAX)),
            terms: listed(batch, terms)?,
            softmax: Some(self.softmax(self.layout.is_packed(), heads)),
            ..self.blank()
        })
    }

    /// The rows after the last sequence, if they are marked: they are filled with 0, like those of a sequence without
    /// keys.
    fn tail(&self, last: Option<&Sequence>) -> Option<Sequence> {
        let last = last.filter(|_| self.fills_tail())?;
        let q_first = last.q_first.saturating_add(last.q_len);
        let q_len = self.axis_rows().0.checked_sub(q_first)?;
        (q_len > 0).then_some(Sequence {
            index: last.index + 1,
            q_first,
            q_len,
            kv_first: last.kv_first.saturating_add(last.kv_len),
            kv_len: 0,
            scores_before: last.scores_before,
        })
    }

    fn terms(&self, sequence: &Sequence) -> SequenceTerms {
        let heads = size(self.heads);
        SequenceTerms {
            geometry: self.geometry(sequence),
            mask: match (self.mask, self.call.mask()) {
                (MaskKind::Full(form), Some(mask)) => Some(form.rows(sequence, heads).moved(in_order(mask).offset)),
                _ => None,
            },
            bias: match (self.bias, &self.call.real_shift) {
                (Bias::Tensor { form, .. }, Some(bias)) => {
                    Some(form.rows(sequence, heads).moved(in_order(bias).offset))
                }
                _ => None,
            },
            key_offset: self.key_offset_of(sequence),
            dropped: (self.call.drop_mask.as_ref())
                .map(|mask| sequence.scores(heads).moved(in_order(mask).offset.saturating_mul(8))),
            softmax: self.softmax_order.rows(sequence, heads),
        }
    }

    fn softmax(&self, packed: bool, heads: usize) -> SoftmaxOutputs {
        let offset = |out: &Option<TensorDesc>| out.as_ref().map_or(0, |out| in_order(out).offset);
        SoftmaxOutputs {
            max_offset: offset(&self.call.softmax_max),
            sum_offset: offset(&self.call.softmax_sum),
            order: (self.softmax_order.matters(packed, heads)).map(SoftmaxOrder::name),
        }
    }

    fn bias_tensor(&self) -> Option<BiasTensor> {
        let Bias::Tensor { before_scale, form } = self.bias else {
            return None;
        };
        let bias = in_order(self.call.real_shift.as_ref()?);
        Some(BiasTensor {
            rows: Rows::none(bias.dtype),
            sizes: [self.lengths.batch(), size(self.heads), size(self.q_rows), size(self.kv_rows)],
            before_scale,
            up_to_row: matches!(form, BiasForm::LastRows(_)),
        })
    }

    fn slopes(&self) -> Option<Slopes> {
        let Bias::Slopes { root, per_sequence } = self.bias else {
            return None;
        };
        let slopes = self.call.real_shift.as_ref()?;
        let head = slopes.strides.last().copied().unwrap_or(0);
        let batch = slopes.strides.first().copied().filter(|_| per_sequence);
        Some(Slopes { grid: by_head(TensorRole::Bias, slopes, (batch.unwrap_or(0), head)), root, key_offset: 0 })
    }

    fn rows(&self, desc: Option<&TensorDesc>, dim: i64) -> Rows {
        let view = desc.and_then(|desc| self.layout.view(desc, dim));
        Rows { view: view.unwrap_or(View::NONE), lanes: 0, dtype: desc.map_or(DType::Float, |desc| desc.dtype) }
    }
}

/// The sums of the lengths up to and including each.
fn running_sums(lengths: impl Iterator<Item = usize>) -> impl Iterator<Item = i64> {
    lengths.scan(0i64, |sum, len| {
        *sum = sum.saturating_add(i64::try_from(len).unwrap_or(i64::MAX));
        Some(*sum)
    })
}

/// Collects at most `most` items into a list, and fails if host memory cannot hold that many.
fn listed<T>(most: usize, all: impl Iterator<Item = T>) -> Result<Vec<T>, Violation> {
    let mut list = Vec::new();
    let reserved = list.try_reserve_exact(most);
    reserved.map_err(|_| Violation::unsupported("more sequences than there is host memory for"))?;
    list.extend(all.take(most));
    Ok(list)
}

/// A grid over a tensor of `FLOAT` with one number for each head, or for each sequence and head.
fn by_head(role: TensorRole, desc: &TensorDesc, (batch, head): (i64, i64)) -> Grid {
    Grid {
        tensor: SmallTensor::new(role, desc, DType::Float),
        view: View { offset: desc.offset, batch, head, ..View::NONE },
        cuts: Cuts::NONE,
        counts: Counts::Tokens,
    }
}

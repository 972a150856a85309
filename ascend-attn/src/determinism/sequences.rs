//! Takes a case apart into its sequences, and makes cases from some of them.

use std::ops::Range;

use ascend_attention::case::{AttentionCase, CaseTensor, Expect, Parameter};
use ascend_attention::spec::attention_problem::{
    AttentionProblem, MaskUse, Padding, SequenceLengths, SequenceRows, TreeMask, Work,
};
use ascend_attention::spec::ops::fused_infer_attention_score::AntiquantMode;
use ascend_attention::spec::{Axes, Layout, Target};

use super::axis::take;

/// A case, and the places of its sequences' rows in its call.
#[derive(Clone)]
pub(super) struct Sequences {
    case: AttentionCase,
    pub(super) layout: Layout,
    pub(super) problem: AttentionProblem<'static>,
    padding: Padding,
}

impl Sequences {
    /// The sequences of a case that its operator takes on `target`, unless the case says otherwise.
    ///
    /// # Errors
    /// Why the case has none: the operator refuses it, or has nothing to compute.
    pub(super) fn of(mut case: AttentionCase, target: Target) -> Result<Self, String> {
        let description = case.describe();
        let call = description.call();
        let checked = case.checked(&call, target);
        let checked = checked.map_err(|refusal| refusal.to_string())?;
        if checked.problem.work != Work::Attend {
            return Err("the call has nothing to compute".to_owned());
        }
        let (layout, problem) = (checked.layout, checked.problem.into_owned());
        let first = |parameter| {
            let size = case.tensor(parameter).and_then(CaseTensor::to_i64);
            size.and_then(|size| size.first().copied()).unwrap_or(0)
        };
        let padding = Padding { query: first(Parameter::QueryPaddingSize), key: first(Parameter::KvPaddingSize) };
        // Outputs are compared with one another, not with those of the file.
        case.expect = Expect::Ok;
        case.expect_rule = None;
        case.expected.clear();
        Ok(Self { case, layout, problem, padding })
    }

    pub(super) fn case(&self) -> &AttentionCase {
        &self.case
    }

    /// Number of sequences.
    pub(super) fn count(&self) -> usize {
        self.problem.batch
    }

    /// Where the rows of sequence `b` are.
    pub(super) fn rows(&self, b: usize) -> SequenceRows {
        self.problem.sequence(b, self.padding)
    }

    /// Whether the keys of all sequences are one after another on one axis.
    pub(super) fn packs_keys(&self) -> bool {
        matches!(self.problem.key_lengths, SequenceLengths::Ends(_))
    }

    /// The call on these sequences alone, in this order; one may be named several times.
    ///
    /// # Errors
    /// The part of the case that cannot be taken apart.
    pub(super) fn select(&self, order: &[usize]) -> Result<AttentionCase, String> {
        self.mask_can_be_cut()?;
        let mut case = self.case.clone();
        let arguments = &self.case.arguments;
        case.arguments = arguments.try_map(|argument, tensor| self.selected(argument.parameter, tensor, order))?;
        if self.has_list() {
            let listed = |of: &[CaseTensor]| order.iter().map(|&b| of[b].clone()).collect();
            case.arguments.key = listed(&arguments.key);
            case.arguments.value = listed(&arguments.value);
        }
        if self.problem.packed {
            let rows = order.iter().map(|&b| self.rows(b).q_len);
            case.arguments.actual_seq_lengths = Some(ends(rows));
        } else {
            let lengths = &arguments.actual_seq_lengths;
            case.arguments.actual_seq_lengths = self.of_each(lengths, order);
        }
        case.arguments.actual_seq_lengths_kv = if self.packs_keys() {
            Some(ends(order.iter().map(|&b| self.rows(b).kv_len)))
        } else {
            self.of_each(&arguments.actual_seq_lengths_kv, order)
        };
        Ok(case)
    }

    /// Whether every sequence has its own tensors of keys and values.
    fn has_list(&self) -> bool {
        self.case.arguments.key.len() > 1
    }

    /// The entries of an array that belong to the sequences in `order`; an array with a single entry for all
    /// sequences stays.
    fn of_each(&self, entries: &Option<Vec<i64>>, order: &[usize]) -> Option<Vec<i64>> {
        let entries = entries.as_ref()?;
        if entries.len() <= 1 {
            return Some(entries.clone());
        }
        let each = order.iter().map(|&b| entries.get(b).copied().unwrap_or(0));
        Some(each.collect())
    }

    /// The part of a tensor that belongs to the sequences in `order`; the whole tensor if all sequences share it.
    fn selected(&self, parameter: Parameter, tensor: &CaseTensor, order: &[usize]) -> Result<CaseTensor, String> {
        let axes = self.layout.input();
        let batches = || order.iter().map(|&b| b..b + 1).collect::<Vec<_>>();
        let paged = self.problem.pages.is_some();
        match parameter {
            Parameter::Query | Parameter::QueryRope | Parameter::DequantScaleQuery => {
                if self.problem.packed {
                    let rows_of = |&b: &usize| part(self.rows(b).q_first, self.rows(b).q_len);
                    let parts: Vec<_> = order.iter().map(rows_of).collect();
                    return take(tensor, axes.row_axis(), &parts);
                }
                take(tensor, batch_axis(axes), &batches())
            }
            Parameter::Key | Parameter::Value if self.has_list() => Ok(tensor.clone()),
            Parameter::Key | Parameter::Value | Parameter::KeyRope if !paged => {
                if self.packs_keys() {
                    let rows_of = |&b: &usize| part(self.rows(b).kv_first, self.rows(b).kv_len);
                    let parts: Vec<_> = order.iter().map(rows_of).collect();
                    return take(tensor, axes.row_axis(), &parts);
                }
                take(tensor, batch_axis(axes), &batches())
            }
            Parameter::BlockTable => take(tensor, 0, &batches()),
            Parameter::AttenMask if self.has_mask_of_each() => take(tensor, 0, &batches()),
            Parameter::PseShift if self.is_of_each(tensor, 0) => take(tensor, 0, &batches()),
            _ => match self.scales_of_tokens(parameter, tensor.shape().len()) {
                None => Ok(tensor.clone()),
                Some(axis) if tensor.shape().get(axis) == Some(&self.count()) => take(tensor, axis, &batches()),
                Some(_) => Err(format!(
                    "{parameter} of shape {:?} has scales of single tokens in no known order",
                    tensor.shape()
                )),
            },
        }
    }

    /// Whether there are several sequences and a tensor has an entry for each on an axis.
    fn is_of_each(&self, tensor: &CaseTensor, axis: usize) -> bool {
        self.count() > 1 && tensor.shape().get(axis) == Some(&self.count())
    }

    /// Whether there are several sequences and each has its own part of the mask.
    fn has_mask_of_each(&self) -> bool {
        let (MaskUse::Full(mask) | MaskUse::Tree(TreeMask::Square(mask))) = self.problem.mask else {
            return false;
        };
        self.count() > 1 && mask.batch != 0
    }

    /// Refuses masks that cannot be cut although what a sequence sees depends on its index in the batch.
    fn mask_can_be_cut(&self) -> Result<(), String> {
        let tensor = self.case.tensor(Parameter::AttenMask);
        if let MaskUse::Tree(TreeMask::Packed { .. }) = self.problem.mask {
            return Err("the tree masks of packed sequences lie one behind another".to_owned());
        }
        match tensor {
            Some(tensor) if self.is_of_each(tensor, 0) => Ok(()),
            _ if !self.has_mask_of_each() => Ok(()),
            _ => Err("what a sequence sees follows from its place in the batch".to_owned()),
        }
    }

    /// The axis of sequences in scales of single tokens; `None` for scales that all sequences share.
    fn scales_of_tokens(&self, parameter: Parameter, rank: usize) -> Option<usize> {
        let behind = match self.antiquant_mode(parameter)? {
            AntiquantMode::PerToken => 2,
            AntiquantMode::PerTokenHead => 3,
            AntiquantMode::PerTokenGroup => 4,
            _ => return None,
        };
        Some(rank.saturating_sub(behind))
    }

    /// Which elements share a scale in one of the tensors of antiquantisation; `None` for other tensors.
    pub(super) fn antiquant_mode(&self, parameter: Parameter) -> Option<AntiquantMode> {
        let arguments = &self.case.arguments;
        AntiquantMode::from_acl(match parameter {
            Parameter::AntiquantScale | Parameter::AntiquantOffset => arguments.antiquant_mode,
            Parameter::KeyAntiquantScale | Parameter::KeyAntiquantOffset => arguments.key_antiquant_mode,
            Parameter::ValueAntiquantScale | Parameter::ValueAntiquantOffset => arguments.value_antiquant_mode,
            _ => return None,
        })
    }
}

/// The axis of sequences.
fn batch_axis(axes: Axes) -> usize {
    match axes {
        Axes::Nbsd => 1,
        _ => 0,
    }
}

fn part(first: usize, len: usize) -> Range<usize> {
    first..first + len
}

/// The end of each sequence when sequences of these lengths follow one another.
pub(super) fn ends(lengths: impl Iterator<Item = usize>) -> Vec<i64> {
    lengths
        .scan(0, |end, length| {
            *end += length as i64;
            Some(*end)
        })
        .collect()
}

//! A step in progress, replayed layer by layer.

use std::fmt;

use ascend_attention::{Element, Output, Stream, Tensor};

use crate::backends::size;
use crate::engine::{RangeChecker, StepRows, apart, packed_tensors};
use crate::error::Result;
use crate::kv::{StepLease, no_layer};

use super::captured_group::LayerPlace;
use super::graph_pool::GraphStep;
use super::graph_tensors::{GraphTensors, GroupBuffers};

/// A step whose layers are replayed from graphs. From [`AttentionGraphs::begin`](crate::AttentionGraphs::begin); end
/// it when the last layer is queued, as a [`Step`](crate::Step).
pub struct AttentionGraphStep<'a, T: Element> {
    /// The leases, which end after the last replay.
    pub(super) leases: Vec<StepLease<'a, Stream>>,
    pub(super) step: GraphStep<'a, Vec<GroupBuffers<T>>>,
    pub(super) places: &'a [LayerPlace],
    pub(super) stream: &'a Stream,
    pub(super) actual: usize,
    pub(super) rows: usize,
    pub(super) range_checker: Option<&'a mut RangeChecker<T>>,
}

impl<'a, T: Element> AttentionGraphStep<'a, T> {
    /// Query tokens of the captured size, padding included.
    pub fn tokens(&self) -> usize {
        self.rows
    }

    /// The tensors of a layer, to be filled in place on the step's stream before [`AttentionGraphStep::replay`].
    /// Padding rows may hold anything.
    ///
    /// # Errors
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a layer that does not exist.
    pub fn tensors(&self, layer: usize) -> Result<&GraphTensors<T>> {
        self.of(layer)
    }

    fn of(&self, layer: usize) -> Result<&'a GraphTensors<T>> {
        let place = self.places.get(layer);
        let buffers = place.and_then(|place| self.step.buffers().get(place.group));
        buffers
            .map(|buffers| &buffers.tensors)
            .ok_or_else(|| no_layer(layer, self.places.len()))
    }

    /// Queues the replay of a layer, whose tensors were filled. Returns at once.
    ///
    /// All layers of a group write the same output, so it is lent until the next call of this step. Queue work that
    /// reads it on the step's stream before that; to keep the output longer, copy it. A clone of the tensor is the
    /// same memory.
    ///
    /// # Errors
    /// As for [`GraphStep::replay`]; with a [range check](crate::AttentionGraphs::set_range_check) also the errors of
    /// its copies: the replay is queued then.
    pub fn replay(&mut self, layer: usize) -> Result<&Output<T>> {
        let tensors = self.of(layer)?;
        self.step.replay(layer)?;
        if let Some(checker) = &mut self.range_checker {
            let GraphTensors {
                query,
                key,
                value,
                output,
            } = tensors;
            let tensors = packed_tensors([query, key, value], &output.attention);
            checker.check(self.stream, layer, tensors)?;
        }
        Ok(&tensors.output)
    }

    /// Copies a layer's query, key and value into its tensors and queues the replay. They have a row for each token
    /// of the step, with the padding or without it; the output has the padding, and is lent until the next call of
    /// this step ([`AttentionGraphStep::replay`]).
    ///
    /// # Errors
    /// [`Rule::StepTokens`](crate::Rule::StepTokens) and [`Rule::StepHeads`](crate::Rule::StepHeads) for tensors of
    /// other shapes; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for an input that is the graph's
    /// tensor for another input; as for [`AnyTensor::copy_from`](ascend_attention::AnyTensor::copy_from) and
    /// [`AttentionGraphStep::replay`].
    pub fn forward(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<&Output<T>> {
        let tensors = self.of(layer)?;
        let rows = StepRows {
            actual: self.actual,
            padded: self.rows,
            padding: false,
        };
        let copies = [
            ("query", query, &tensors.query),
            ("key", key, &tensors.key),
            ("value", value, &tensors.value),
        ];
        for (name, from, to) in copies {
            let (heads, dim) = (size(to, 1), size(to, 2));
            rows.check(name, from, layer, heads, Some(dim))?;
        }
        // An input in another input's place would be overwritten before it is copied.
        let places = [
            ("the graph's query", &*tensors.query),
            ("the graph's key", &*tensors.key),
            ("the graph's value", &*tensors.value),
        ];
        for (at, (name, from, _)) in copies.into_iter().enumerate() {
            let others = places
                .into_iter()
                .enumerate()
                .filter(|(other, _)| *other != at);
            apart(name, from, others.map(|(_, place)| place))?;
        }
        for (_, from, to) in copies {
            to.narrow(0, 0..size(from, 0))?
                .copy_from(self.stream, from)?;
        }
        self.replay(layer)
    }

    /// Ends the step, and checks that all its layers were queued: [`Step::end`](crate::Step::end).
    ///
    /// # Errors
    /// As for [`Step::end`](crate::Step::end).
    pub fn end(self) -> Result<()> {
        self.step.end()
    }

    /// The leases that keep blocks from being handed out while the step may read them, one for each group of layers.
    pub fn leases(&self) -> &[StepLease<'a, Stream>] {
        &self.leases
    }
}

impl<T: Element> fmt::Debug for AttentionGraphStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionGraphStep")
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

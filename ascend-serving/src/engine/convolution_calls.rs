//! The calls that convolve a layer of a step, whose numbers are on the device: which rows each request has, and which
//! windows of the pool they read and write.
//!
//! One call convolves the new rows of all requests, each behind the window in the first slot of its state, which
//! becomes the window behind its last row. A request that keeps the state behind each of several tokens keeps a window
//! behind each too. The history of a request is its window, then its new rows; each window behind a token is part of
//! it. So the windows are gathered before the call, and behind it a scatter for each row of a window puts that row of
//! all of them to its slot.

use ascend_attention::causal_conv::{CausalConvPlan, ConvInputs, ConvSequence, ConvSequences};
use ascend_attention::gather::{GatherPaKvCache, GatherPlan, SequenceBlocks};
use ascend_attention::scatter::{ScatterPaKvCache, ScatterPlan, SlotMapping};
use ascend_attention::{Element, Queue, Stream, Tensor};

use crate::backends::size;
use crate::error::Result;
use crate::kv::{StateLease, StatePool};

/// The place of a row that goes nowhere: the operator passes over slots below 0.
const NOWHERE: i64 = -1;
/// The lint of such places.
const NOWHERE_LINT: &str = "slot_mapping.negative";

/// The numbers of the calls of a step, for its requests with new rows.
#[derive(Debug)]
pub(crate) struct ConvolutionRows {
    sequences: Vec<ConvSequence>,
    /// The slot of the window that each request begins with.
    begins: Vec<[usize; 1]>,
    /// For each row of a window, where each row of the history goes in the pool.
    places: Vec<Vec<i64>>,
    keeps: bool,
}

impl ConvolutionRows {
    /// The numbers of a step of these states, over windows of `front` rows, that is padded to `requests` requests
    /// with `rows` rows together. Rows of padding are left out.
    pub(crate) fn of(front: usize, states: &[StateLease], (requests, rows): (usize, usize)) -> Self {
        let states = || states.iter().filter(|state| state.new_tokens() > 0);
        let requests = requests.max(states().count());
        let windows = requests * front;
        let mut sequences = Vec::with_capacity(requests);
        let mut begins = Vec::with_capacity(requests);
        let mut places = vec![vec![NOWHERE; windows + rows]; front];
        let (mut first, mut keeps) = (0usize, false);
        for (request, state) in states().enumerate() {
            let (new, slots) = (state.new_tokens(), state.row());
            let begin = slots.first().copied().unwrap_or(0);
            sequences.push(ConvSequence { rows: new, line: Some(begin), continues: true });
            begins.push([begin]);
            if state.is_kept() && new > 1 {
                keeps = true;
                for (token, slot) in slots.iter().enumerate() {
                    for (row, places) in places.iter_mut().enumerate() {
                        // Counted in the window in front of the request's rows and in these as one.
                        let from = token + 1 + row;
                        let source = match from.checked_sub(front) {
                            None => request * front + from,
                            Some(own) => windows + first + own,
                        };
                        if let Some(place) = places.get_mut(source) {
                            *place = (slot * front + row) as i64;
                        }
                    }
                }
            }
            first += new;
        }
        // The last one has the rows of the padding.
        while sequences.len() < requests {
            let is_last = sequences.len() + 1 == requests;
            let rows = if is_last { rows.saturating_sub(first) } else { 0 };
            sequences.push(ConvSequence { rows, line: None, continues: true });
            begins.push([0]);
        }
        Self { sequences, begins, places, keeps }
    }

    /// Whether a request keeps a window behind each of several tokens.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }
}

/// The calls that convolve a layer, planned once for all layers.
#[derive(Debug)]
pub(crate) struct ConvolutionCalls<T: Element> {
    sequences: ConvSequences,
    convolve: CausalConvPlan,
    kept: Option<KeptWindows<T>>,
}

/// The calls that keep a window behind each token.
#[derive(Debug)]
struct KeptWindows<T: Element> {
    begins: SequenceBlocks,
    gather: GatherPlan,
    scatter: ScatterPlan,
    places: Vec<SlotMapping>,
    history: Tensor<T>,
    windows: Tensor<T>,
    rows: Tensor<T>,
    /// What the gather takes for values: the same windows once more.
    again: Tensor<T>,
}

/// The tensors of a layer's convolution.
#[derive(Clone, Copy)]
pub(crate) struct ConvolutionTensors<'a, T: Element> {
    pub(crate) x: &'a Tensor<T>,
    pub(crate) weight: &'a Tensor<T>,
    pub(crate) bias: Option<&'a Tensor<T>>,
    /// The windows of the layer in the pool.
    pub(crate) windows: &'a Tensor<T>,
}

impl<'a, T: Element> ConvolutionTensors<'a, T> {
    fn inputs(self) -> ConvInputs<'a, T> {
        let inputs = ConvInputs::from((self.x, self.weight, self.windows));
        self.bias.map_or(inputs, |bias| inputs.bias(bias))
    }

    /// The windows as blocks of rows.
    fn blocks(self) -> Result<Tensor<T>> {
        let [slots, front, channels] = [0, 1, 2].map(|axis| size(self.windows, axis));
        Ok(self.windows.reshape([slots, front, 1, channels])?)
    }
}

/// Rows as a scatter takes them.
fn with_head<T: Element>(rows: &Tensor<T>) -> Result<Tensor<T>> {
    Ok(rows.reshape([size(rows, 0), 1, size(rows, 1)])?)
}

impl<T: Element> ConvolutionCalls<T> {
    /// Plans the calls of a step, with the tensors of a layer, for those of all layers. `keeps` says whether there are
    /// the calls that keep a window behind each token.
    pub(crate) fn plan(
        pool: &StatePool,
        stream: &Stream,
        (rows, keeps): (&ConvolutionRows, bool),
        tensors: ConvolutionTensors<'_, T>,
    ) -> Result<Self> {
        let sequences = ConvSequences::new(stream, &rows.sequences)?;
        let convolve = pool.convolution_call().plan(&sequences, tensors.inputs())?;
        let kept = keeps.then(|| KeptWindows::plan(stream, rows, tensors)).transpose()?;
        Ok(Self { sequences, convolve, kept })
    }

    /// Rows that the calls read without a copy, if there are such: those behind the windows of their history.
    pub(crate) fn own_rows(&self) -> Option<&Tensor<T>> {
        self.kept.as_ref().map(|kept| &kept.rows)
    }

    /// Replaces the numbers of the calls, for the next replay.
    pub(crate) fn overwrite(&self, stream: &Stream, rows: &ConvolutionRows) -> Result<()> {
        self.sequences.overwrite(stream, &rows.sequences)?;
        if let Some(kept) = &self.kept {
            let lengths = vec![rows.places.len(); rows.begins.len()];
            kept.begins.overwrite(stream, &rows.begins, &lengths)?;
            for (mapping, places) in kept.places.iter().zip(&rows.places) {
                mapping.overwrite(stream, places)?;
            }
        }
        Ok(())
    }

    /// Queues the calls of a layer. `wrote` is called before the first one that writes windows. Where a window is kept
    /// behind each token, `x` is the calls' [own rows](Self::own_rows).
    pub(crate) fn launch(
        &self,
        queue: &impl Queue,
        tensors: ConvolutionTensors<'_, T>,
        y: &mut Tensor<T>,
        wrote: impl FnOnce(),
    ) -> Result<()> {
        let Some(kept) = &self.kept else {
            wrote();
            return Ok(self.convolve.launch_into(queue, tensors.inputs(), y)?);
        };
        let blocks = tensors.blocks()?;
        let mut gathered = (kept.windows.clone(), kept.again.clone());
        kept.gather.launch_into(queue, (&blocks, &blocks), &mut gathered)?;
        wrote();
        self.convolve.launch_into(queue, tensors.inputs(), y)?;
        for places in &kept.places {
            kept.scatter.launch(queue, (&kept.history, places, &blocks))?;
        }
        Ok(())
    }
}

impl<T: Element> KeptWindows<T> {
    fn plan(stream: &Stream, rows: &ConvolutionRows, tensors: ConvolutionTensors<'_, T>) -> Result<Self> {
        let blocks = tensors.blocks()?;
        let [slots, front, channels] = [0, 1, 3].map(|axis| size(&blocks, axis));
        let lengths = vec![front; rows.begins.len()];
        let begins = SequenceBlocks::new(stream, &rows.begins, &lengths, slots, front)?;
        let gather = GatherPaKvCache::new().plan(&begins, (&blocks, &blocks))?;
        let gathered = begins.tokens();
        let all = rows.places.first().map_or(0, Vec::len);
        let elements = all * channels;
        let history = Tensor::from_buffer(&stream.device().alloc_zeroed::<T>(elements)?, [all, channels])?;
        let pool_rows = slots * front;
        let places =
            rows.places.iter().map(|places| Ok(SlotMapping::allowing(stream, places, pool_rows, &[NOWHERE_LINT])?));
        let places = places.collect::<Result<Vec<_>>>()?;
        let of_history = with_head(&history)?;
        let Some(first) = places.first() else {
            return Err(crate::error::Error::invalid("width", 1, "2 to 4").fix("give the width of the convolution"));
        };
        Ok(Self {
            scatter: ScatterPaKvCache::new().plan((&of_history, first, &blocks))?,
            windows: with_head(&history.narrow(0, 0..gathered)?)?,
            rows: history.narrow(0, gathered..all)?,
            again: Tensor::empty(stream.device(), [gathered, 1, channels])?,
            history: of_history,
            begins,
            gather,
            places,
        })
    }
}

//! A dense layer and one that leaves out the middle, run with the same numbers.

use std::time::Instant;

use ascend_attention::{Number, Stream, Tensor};
use ascend_serving::{OutputDeviation, Result};

use crate::prefill::{TrianglePlan, TrianglePrefill};
use crate::rows::BlockSparseUse;

/// How long a dense layer and one that leaves out the middle take, and how far the outputs of both differ. From
/// [`TrianglePrefill::compare`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerComparison {
    /// Median time of a dense layer.
    pub dense_seconds: f64,
    /// Median time of a layer that leaves out the middle, by calls of the stock operator.
    pub triangle_seconds: f64,
    /// Median time of a layer that leaves out the middle, by a block-sparse call, where the operators take it.
    pub block_sparse_seconds: Option<f64>,
    /// Runs of each layer.
    pub runs: usize,
    /// How far the outputs of the layer that leaves out the middle, `[tokens, N, D]`, are from those of the dense one.
    pub difference: OutputDeviation,
    /// How far the outputs that leave out the middle differ between stock and block-sparse calls, which is by rounding.
    pub block_sparse_difference: Option<OutputDeviation>,
}

impl TrianglePrefill {
    /// Runs a dense layer and one that leaves out the middle, `runs` times each behind a first run that does not
    /// count: a whole prompt, with query, key and value as for [`TrianglePrefill::plan`]. Waits for the work.
    ///
    /// # Errors
    /// As for [`TrianglePrefill::plan`], [`TrianglePlan::launch`] and [`Tensor::download`].
    pub fn compare<T: Number>(
        &self,
        stream: &Stream,
        tensors: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        runs: usize,
    ) -> Result<LayerComparison> {
        let tokens = tensors.0.shape().first().copied().unwrap_or(0);
        // A prompt of unknown length is dense.
        let dense = self.plan(stream, (0, None), tensors)?;
        let by_calls = |block_sparse| {
            let mut prefill = *self;
            prefill.thresholds.block_sparse = block_sparse;
            prefill.plan(stream, (0, Some(tokens)), tensors)
        };
        let triangle = by_calls(BlockSparseUse::Never)?;
        let block_sparse = by_calls(BlockSparseUse::Always)?;
        let block_sparse = Some(block_sparse).filter(TrianglePlan::is_block_sparse);
        let timed = |plan: &TrianglePlan| -> Result<(f64, Tensor<T>)> {
            let start = Instant::now();
            let output = plan.launch(stream, tensors)?;
            stream.synchronize()?;
            Ok((start.elapsed().as_secs_f64(), output))
        };
        let outputs = [timed(&dense)?.1, timed(&triangle)?.1];
        let block_sparse_output = block_sparse.as_ref().map(&timed).transpose()?;
        let (mut dense_seconds, mut triangle_seconds) = (Vec::new(), Vec::new());
        let mut block_sparse_seconds = Vec::new();
        for _ in 0..runs {
            if let Some(block_sparse) = &block_sparse {
                block_sparse_seconds.push(timed(block_sparse)?.0);
            }
            dense_seconds.push(timed(&dense)?.0);
            triangle_seconds.push(timed(&triangle)?.0);
        }
        let [dense, triangle] = [outputs[0].download(stream)?, outputs[1].download(stream)?];
        let block_sparse_output = block_sparse_output.map(|(_, output)| output.download(stream)).transpose()?;
        let deviation = |reference: &[T], others: &[T]| {
            let mut deviation = OutputDeviation::default();
            deviation.add(reference, others);
            deviation
        };
        Ok(LayerComparison {
            dense_seconds: median(dense_seconds),
            triangle_seconds: median(triangle_seconds),
            block_sparse_seconds: block_sparse.map(|_| median(block_sparse_seconds)),
            runs,
            difference: deviation(&dense, &triangle),
            block_sparse_difference: block_sparse_output.map(|output| deviation(&triangle, &output)),
        })
    }
}

/// The middle value, or the upper of the two in the middle; 0 without any.
fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
}

//! What the parts of the causal triangle contribute in one layer, from products of matrices on a device.
//!
//! [`LayerSample::parts`](crate::LayerSample::parts) computes the same on the host, from the same two inputs.

#![allow(clippy::arithmetic_side_effects, reason = "tiles lie in tensors that exist")]

use std::ops::Range;

use ascend_attention::matmul::{BatchMatMul, BatchMatMulPlan};
use ascend_attention::spec::geometry::TriangleMix;
use ascend_attention::{DType, DeviceBuffer, Error, HostBuffer, Number, Result, Stream, Tensor, Transfer};

use crate::probe::{ProbeMeasure, TriangleProbe};
use crate::sample::{PartSums, Parts, check_sizes};

/// Bytes of products that are held at a time, on the device and on the host: half of them are summed up while the
/// other half is computed.
const BYTES: usize = 64 << 20;

/// Most keys of a tile.
const KEYS: usize = 2048;

/// Most rows of a tile.
const ROWS: usize = 512;

/// The gradient of one layer's output and the layer's values over a whole prompt, on a device. The gradient with
/// respect to the attention weights, `dP = dO Vᵀ`, follows from them.
///
/// The products are computed on the device by [`BatchMatMul`], in tiles that take 64 MiB at a time, and summed up on
/// the host in double precision while the device computes the next tile. Tiles above the diagonal are left out.
///
/// ```
/// use ascend_attention::Runtime;
/// use ascend_trianglemix::TriangleProbe;
/// use ascend_attention::spec::geometry::TriangleMix;
/// use ascend_trianglemix::WeightGradientSample;
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // 5 tokens, 2 query heads that share a head of values, 4 elements a head.
/// let output_gradient = stream.upload(&[0.5f32; 5 * 2 * 4], [5, 2, 4])?;
/// let value = stream.upload(&[0.25f32; 5 * 4], [5, 1, 4])?;
/// let sample = WeightGradientSample::new(&output_gradient, &value)?;
/// let mut probe = TriangleProbe::new(32, TriangleMix::new(1, 1, 1))?;
/// sample.record(&stream, &mut probe, 7)?;
/// // Each cell is 4 * 0.5 * 0.25; row 3 leaves out one key.
/// assert_eq!(probe.contributions()[7].middle, 0.5);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct WeightGradientSample<T: Number> {
    output_gradient: Tensor<T>,
    value: Tensor<T>,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    product: BatchMatMul,
}

impl<T: Number> WeightGradientSample<T> {
    /// A sample of `output_gradient` `[tokens, heads, value_dim]` and `value` `[tokens, kv_heads, value_dim]`, of
    /// `f32`, `f16` or `bf16`; either may be a view. Each head of values serves the same number of query heads. The
    /// tensors are shared, not copied.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for other shapes, without a token, head or element, or query
    /// heads that are no multiple of the others.
    pub fn new(output_gradient: &Tensor<T>, value: &Tensor<T>) -> Result<Self> {
        let &[tokens, heads, value_dim] = output_gradient.shape() else {
            return Err(Error::invalid("output_gradient", output_gradient.desc(), "[tokens, heads, value_dim]")
                .fix("reshape the gradient to packed rows"));
        };
        let kv_heads = match value.shape() {
            &[of_value, kv_heads, dim] if (of_value, dim) == (tokens, value_dim) => kv_heads,
            _ => {
                return Err(Error::invalid("value", value.desc(), format_args!("[{tokens}, kv_heads, {value_dim}]"))
                    .fix("reshape the values to packed rows"));
            }
        };
        let sizes = [("tokens", tokens), ("heads", heads), ("kv_heads", kv_heads), ("value_dim", value_dim)];
        check_sizes(&sizes, heads, kv_heads)?;
        Ok(Self {
            output_gradient: output_gradient.clone(),
            value: value.clone(),
            tokens,
            heads,
            kv_heads,
            product: BatchMatMul::new(),
        })
    }

    /// Multiplies by this description, such as one with another
    /// [`cube_math_type`](BatchMatMul::cube_math_type): 310P and 910A take `f32` only with
    /// [`AllowFp32DownPrecision`](ascend_attention::matmul::CubeMathType::AllowFp32DownPrecision) or
    /// [`UseFp16`](ascend_attention::matmul::CubeMathType::UseFp16).
    #[must_use]
    pub fn product(mut self, product: BatchMatMul) -> Self {
        self.product = product;
        self
    }

    /// What each part contributes: the mean over the query heads of the sum of `|dP|` over the part's cells. The
    /// products are rounded to `T`. Waits for the work.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device than the stream;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for elements that are not finite, or so large that products
    /// are not; as for [`BatchMatMul::plan`], [`Plan::launch_into`](ascend_attention::operation::Plan::launch_into),
    /// [`Device::alloc`](ascend_attention::Device::alloc) and [`Tensor::download_async`].
    pub fn parts(&self, stream: &Stream, sizes: TriangleMix) -> Result<PartSums> {
        let device = stream.device();
        self.output_gradient.check_device("output_gradient", device)?;
        self.value.check_device("value", device)?;
        let tiles = Tiles::of(self, BYTES / 2 / size_of::<T>());
        let parts = Parts::new(sizes, self.tokens);
        let products: Vec<Product> = tiles.products().collect();
        let mut plans: Vec<ProductPlan> = Vec::new();
        let room = tiles.elements();
        let mut cells = Vec::new();
        let mut sums = PartSums::default();
        // One of the two is computed and copied while the other one is summed up.
        let mut spare = [None, None];
        let mut running: Option<QueuedProduct<'_, T>> = None;
        for (product, half) in products.iter().zip([0, 1].into_iter().cycle()) {
            let (buffer, host) = match spare.get_mut(half).and_then(Option::take) {
                Some(both) => both,
                None => (device.alloc::<T>(room)?, device.host_buffer::<T>(room)?),
            };
            let next = self.start(stream, product, &mut plans, buffer, host)?;
            if let Some(done) = running.replace(next) {
                let back = done.finish(&parts, &mut cells, &mut sums)?;
                if let Some(place) = spare.get_mut(1 - half) {
                    *place = Some(back);
                }
            }
        }
        if let Some(done) = running {
            done.finish(&parts, &mut cells, &mut sums)?;
        }
        sums.over(self.heads as f64).finite(match T::DTYPE {
            DType::Float => "look for elements that are not finite, or divide the output gradient",
            _ => "look for elements that are not finite, divide the output gradient, or take f32",
        })
    }

    /// Adds the sample to a probe, as [`TriangleProbe::record_sample`] does for one on the host.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that the probe does not have, or a probe that
    /// measures something else than [`ProbeMeasure::WeightGradient`]; as for [`WeightGradientSample::parts`].
    pub fn record(&self, stream: &Stream, probe: &mut TriangleProbe, layer: usize) -> Result<()> {
        probe.admits(layer, ProbeMeasure::WeightGradient)?;
        let sums = self.parts(stream, probe.sizes())?;
        probe.record_parts(layer, ProbeMeasure::WeightGradient, sums)
    }

    /// Queues one product and its copy to the host.
    fn start<'p>(
        &self,
        stream: &Stream,
        product: &'p Product,
        plans: &mut Vec<ProductPlan>,
        buffer: DeviceBuffer<T>,
        host: HostBuffer<T>,
    ) -> Result<QueuedProduct<'p, T>> {
        let gradient = self.output_gradient.narrow(0, product.rows.clone())?;
        let gradient = gradient.narrow(1, product.heads.clone())?.permute([1, 0, 2])?;
        let value = self.value.narrow(0, product.keys.clone())?;
        let value = value.narrow(1, product.kv_heads.clone())?.permute([1, 2, 0])?;
        let shape = [product.heads.len(), product.rows.len(), product.keys.len()];
        let known = plans.iter().position(|planned| planned.shape == shape);
        let at = match known {
            Some(at) => at,
            None => {
                let plan = self.product.plan((&gradient, &value))?;
                plans.push(ProductPlan { shape, plan });
                plans.len() - 1
            }
        };
        let mut out = Tensor::from_buffer(&buffer, shape)?;
        let ProductPlan { plan, .. } = &plans[at];
        plan.launch_into(stream, (&gradient, &value), &mut out)?;
        let whole = Tensor::from_buffer(&buffer, [host.len()])?;
        Ok(QueuedProduct { product, transfer: whole.download_async(stream, host)?, buffer })
    }
}

/// A plan, for products of one shape.
struct ProductPlan {
    shape: [usize; 3],
    plan: BatchMatMulPlan,
}

/// Some rows and keys of some query heads, which share heads of values.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Product {
    heads: Range<usize>,
    kv_heads: Range<usize>,
    rows: Range<usize>,
    keys: Range<usize>,
}

/// A product that was queued.
struct QueuedProduct<'p, T: Number> {
    product: &'p Product,
    transfer: Transfer<T>,
    buffer: DeviceBuffer<T>,
}

impl<T: Number> QueuedProduct<'_, T> {
    /// Waits for the product, adds it up, and gives its memory back.
    fn finish(
        self,
        parts: &Parts,
        cells: &mut Vec<f64>,
        sums: &mut PartSums,
    ) -> Result<(DeviceBuffer<T>, HostBuffer<T>)> {
        let host = self.transfer.wait()?;
        let Product { heads, rows, keys, .. } = self.product;
        let each_row = heads.clone().flat_map(|_| rows.clone());
        for (row, products) in each_row.zip(host.chunks(keys.len())) {
            cells.clear();
            cells.extend(products.iter().map(|cell| cell.to_f64().abs()));
            sums.add(parts.row_sums(row, keys, cells));
        }
        Ok((self.buffer, host))
    }
}

/// How the products of a sample are cut.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    tokens: usize,
    /// Query heads of a product, and heads of values: those of one group, or, where no heads are shared, all.
    heads: usize,
    kv_heads: usize,
    /// Number of groups.
    groups: usize,
    rows: usize,
    keys: usize,
}

impl Tiles {
    /// Tiles whose products have at most `elements` elements, if there are not more heads than that.
    fn of<T: Number>(sample: &WeightGradientSample<T>, elements: usize) -> Self {
        let group = sample.heads / sample.kv_heads.max(1);
        let (heads, kv_heads, groups) = match group {
            1 => (sample.heads, sample.kv_heads, 1),
            _ => (group, 1, sample.kv_heads),
        };
        let cells = (elements / heads.max(1)).max(1);
        let keys = sample.tokens.min(KEYS).min(cells);
        let rows = (cells / keys.max(1)).clamp(1, ROWS).min(sample.tokens);
        Self { tokens: sample.tokens, heads, kv_heads, groups, rows, keys }
    }

    /// Elements of the largest product.
    fn elements(&self) -> usize {
        self.heads.saturating_mul(self.rows).saturating_mul(self.keys)
    }

    /// Every product that has a cell on the diagonal or below.
    fn products(self) -> impl Iterator<Item = Product> {
        let Self { tokens, heads, kv_heads, groups, .. } = self;
        let cut = move |count: usize, step: usize| {
            let firsts = (0..count).step_by(step.max(1));
            firsts.map(move |first| first..first.saturating_add(step).min(tokens))
        };
        (0..groups).flat_map(move |group| {
            cut(tokens, self.rows).flat_map(move |rows| {
                cut(rows.end, self.keys).map(move |keys| Product {
                    heads: group * heads..(group + 1) * heads,
                    kv_heads: group * kv_heads..(group + 1) * kv_heads,
                    rows: rows.clone(),
                    keys,
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_cover_the_triangle_once_and_stay_small() {
        let tiles = Tiles { tokens: 11, heads: 2, kv_heads: 1, groups: 3, rows: 4, keys: 3 };
        let mut seen = [[[0u8; 11]; 11]; 6];
        for product in tiles.products() {
            assert!(product.rows.len() <= 4 && product.keys.len() <= 3);
            assert!(product.keys.start < product.rows.end, "above the diagonal");
            assert_eq!(product.kv_heads.start, product.heads.start / 2);
            for head in product.heads.clone() {
                for row in product.rows.clone() {
                    for key in product.keys.clone() {
                        seen[head][row][key] += 1;
                    }
                }
            }
        }
        for of_head in &seen {
            for (i, row) in of_head.iter().enumerate() {
                assert!(row[..=i].iter().all(|&times| times == 1));
                assert!(row[i..].iter().all(|&times| times <= 1));
            }
        }
    }
}

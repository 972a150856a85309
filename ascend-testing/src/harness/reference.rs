//! Attention by its definition, in double precision, knowing nothing of the crate's own rules and kernels.

use std::ops::Range;

use ascend_attention::{Layout, Number, bf16, f16};

/// An element type that attention computes in.
pub trait Half: Number {
    /// How far a result may be from the exact one: its own rounding, and that of the probabilities.
    const TOLERANCE: f64;
    const NAN: Self;
    /// All of these numbers. Not generic, so that it is compiled here, with optimisation.
    fn all_of(numbers: &[f32]) -> Vec<Self>;
    /// These numbers in double precision, compiled here as well.
    fn all_exact(numbers: &[Self]) -> Vec<f64>;
}

macro_rules! halves {
    ($( $half:ident, $tolerance:literal; )*) => {$(
        impl Half for $half {
            const TOLERANCE: f64 = $tolerance;
            const NAN: Self = $half::NAN;
            fn all_of(numbers: &[f32]) -> Vec<Self> {
                numbers.iter().map(|x| $half::from_f32(*x)).collect()
            }
            fn all_exact(numbers: &[Self]) -> Vec<f64> {
                numbers.iter().map(|x| x.to_f64()).collect()
            }
        }
    )*};
}

halves! {
    f16, 1.5e-3;
    bf16, 1e-2;
}

/// A tensor by its logical axes: batch, head, row, dimension.
#[derive(Clone, Debug)]
pub struct Logical<T> {
    pub batch: usize,
    pub heads: usize,
    pub rows: usize,
    pub dim: usize,
    pub data: Vec<T>,
}

impl<T: Copy> Logical<T> {
    pub fn at(&self, b: usize, n: usize, s: usize, d: usize) -> T {
        self.data[((b * self.heads + n) * self.rows + s) * self.dim + d]
    }

    pub fn row(&self, b: usize, n: usize, s: usize) -> &[T] {
        let first = ((b * self.heads + n) * self.rows + s) * self.dim;
        &self.data[first..first + self.dim]
    }

    /// Some rows of a single batch entry, as a tensor of their own.
    pub fn narrow(&self, rows: Range<usize>) -> Self {
        let all = (0..self.heads).flat_map(|n| rows.clone().map(move |s| (n, s)));
        Self { data: all.flat_map(|(n, s)| self.row(0, n, s).to_vec()).collect(), rows: rows.len(), ..*self }
    }

    /// Some rows of a single batch entry, packed: `[rows, N, D]`.
    pub fn packed(&self, rows: Range<usize>) -> Vec<T> {
        let all = rows.flat_map(|s| (0..self.heads).map(move |n| (n, s)));
        all.flat_map(|(n, s)| self.row(0, n, s).to_vec()).collect()
    }

    /// Shape and elements in an axis order, `BNSD`, `BSND` or `BSH`.
    pub fn pack(&self, axes: &str) -> (Vec<usize>, Vec<T>) {
        let (b, n, s, d) = (self.batch, self.heads, self.rows, self.dim);
        if axes == "BNSD" {
            return (vec![b, n, s, d], self.data.clone());
        }
        let mut data = Vec::with_capacity(self.data.len());
        for i in 0..b {
            for row in 0..s {
                for head in 0..n {
                    data.extend((0..d).map(|x| self.at(i, head, row, x)));
                }
            }
        }
        match axes {
            "BSND" => (vec![b, s, n, d], data),
            "BSH" => (vec![b, s, n * d], data),
            _ => panic!("{axes}"),
        }
    }

    /// The element in packed data of an axis order.
    pub fn index(&self, axes: &str, b: usize, n: usize, s: usize, d: usize) -> usize {
        match axes {
            "BNSD" => ((b * self.heads + n) * self.rows + s) * self.dim + d,
            _ => ((b * self.rows + s) * self.heads + n) * self.dim + d,
        }
    }
}

impl<T: Half> Logical<T> {
    /// Numbers between -1 and 1 for batch, heads, rows and dimension, the same for each seed.
    pub fn random(seed: u64, [batch, heads, rows, dim]: [usize; 4]) -> Self {
        let data = T::all_of(&super::numbers(seed, batch * heads * rows * dim));
        Self { batch, heads, rows, dim, data }
    }

    /// The numbers of the tensor in double precision.
    pub fn exact(&self) -> Logical<f64> {
        let Self { batch, heads, rows, dim, ref data } = *self;
        Logical { batch, heads, rows, dim, data: T::all_exact(data) }
    }
}

/// Axis orders of inputs and output.
pub fn axes(layout: Layout) -> (&'static str, &'static str) {
    match layout {
        Layout::Bsh => ("BSH", "BSH"),
        Layout::Bsnd => ("BSND", "BSND"),
        Layout::Bnsd => ("BNSD", "BNSD"),
        Layout::BnsdBsnd => ("BNSD", "BSND"),
        other => panic!("{other}"),
    }
}

/// Which keys a row sees.
#[derive(Clone, Debug)]
pub enum Sees {
    All,
    /// `j <= i`
    LeftUp,
    /// `j <= i + Skv - Sq`
    RightDown,
    /// `i + Skv - Sq - pre <= j <= i + Skv - Sq + next`
    Band(i64, i64),
    /// `i - pre <= j <= i + next`
    Window(i64, i64),
}

impl Sees {
    pub fn sees(&self, i: usize, j: usize, sq: usize, skv: usize) -> bool {
        let (i, j) = (i as i64, j as i64);
        let shift = skv as i64 - sq as i64;
        match *self {
            Sees::All => true,
            Sees::LeftUp => j <= i,
            Sees::RightDown => j <= i + shift,
            Sees::Band(pre, next) => i + shift - pre <= j && j <= i + shift + next,
            Sees::Window(pre, next) => i - pre <= j && j <= i + next,
        }
    }
}

/// One row's result: none where it sees no key.
pub type Row = Option<(Vec<f64>, f64)>;

/// One row of attention: output and log-sum-exp.
#[allow(clippy::too_many_arguments, reason = "each is a part of the definition")]
pub fn row(
    q: &Logical<f64>,
    k: &Logical<f64>,
    v: &Logical<f64>,
    (b, kv_b): (usize, usize),
    head: usize,
    i: usize,
    scale: f64,
    visible: impl Fn(usize) -> bool,
) -> Row {
    let keys: Vec<usize> = (0..k.rows).filter(|&j| visible(j)).collect();
    row_over(q, k, v, (b, kv_b), head, i, scale, &keys)
}

/// One row of attention over some keys. No generic function, so that it is compiled here, with optimisation.
#[allow(clippy::too_many_arguments, reason = "each is a part of the definition")]
fn row_over(
    q: &Logical<f64>,
    k: &Logical<f64>,
    v: &Logical<f64>,
    (b, kv_b): (usize, usize),
    head: usize,
    i: usize,
    scale: f64,
    keys: &[usize],
) -> Row {
    let kv_head = head / (q.heads / k.heads);
    let query = q.row(b, head, i);
    let mut scores = Vec::new();
    for &j in keys {
        let products = query.iter().zip(k.row(kv_b, kv_head, j)).map(|(x, y)| x * y);
        scores.push((j, scale * products.sum::<f64>()));
    }
    if scores.is_empty() {
        return None;
    }
    let max = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(s.1));
    let sum: f64 = scores.iter().map(|s| (s.1 - max).exp()).sum();
    let mut out = vec![0.0; v.dim];
    for (j, score) in scores {
        let weight = (score - max).exp() / sum;
        for (x, value) in out.iter_mut().zip(v.row(kv_b, kv_head, j)) {
            *x += weight * value;
        }
    }
    Some((out, max + sum.ln()))
}

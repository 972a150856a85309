//! What came out of a call, against what the oracle says.

use ascend_spec::DType;
use ascend_spec::attention_problem::{AttentionProblem, Rows};
use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use half::{bf16, f16};

/// The outputs of a call: the bytes of both tensors, which held 0xff everywhere before.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    /// Element type of the tensors that have the call's own.
    pub dtype: DType,
    pub attention_out: &'a [u8],
    pub softmax_lse: &'a [u8],
}

impl Written<'_> {
    /// Element of the output.
    pub fn output(&self, rows: &Rows, at: (usize, usize, usize), d: usize) -> f64 {
        let index = (rows.view.at(at.0, at.1, at.2) + d as i64 * rows.view.dim) as usize;
        let bytes = self.attention_out;
        match self.out_dtype(rows) {
            DType::Float16 => f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64(),
            DType::Bf16 => bf16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64(),
            DType::Int8 => f64::from(bytes[index].cast_signed()),
            DType::Float8E4M3Fn => f64::from(Float8E4M3Fn::from_bits(bytes[index]).to_f32()),
            DType::HiFloat8 => f64::from(HiFloat8::from_bits(bytes[index]).to_f32()),
            _ => single(bytes, index),
        }
    }

    fn out_dtype(&self, rows: &Rows) -> DType {
        match rows.dtype {
            DType::Int8 | DType::Float8E4M3Fn | DType::HiFloat8 => rows.dtype,
            _ => self.dtype,
        }
    }

    /// Log-sum-exp of a row.
    pub fn lse(&self, rows: &Rows, at: (usize, usize, usize)) -> f64 {
        let index = rows.view.at(at.0, at.1, at.2) as usize;
        single(self.softmax_lse, index)
    }

    /// Compares output and log-sum-exp, as far as it is written, with the oracle's. Weights and output are rounded to
    /// the element type: some units of its precision are allowed, absolute and relative, and an integer may round the
    /// other way. Scores of a size of 10 have an error of 1e-6 in single precision.
    pub fn compare(&self, problem: &AttentionProblem<'_>, attention: &[f64], lse: &[f64]) -> Result<(), String> {
        let int8 = problem.int8_query.is_some();
        let tolerance = match (self.out_dtype(&problem.out), self.dtype) {
            // A weight that is rounded the other way moves an output by one value in 127.
            (DType::Int8, _) => 1.0 + if int8 { 4.0 } else { 0.0 },
            _ if int8 => 5e-2,
            (_, DType::Float16) => 2e-3,
            (_, DType::Bf16) => 1.5e-2,
            // A score is a sum of some hundred products in single precision; its error is the weight's relative one.
            _ => 1e-4,
        };
        let close = |got: f64, want: f64, tolerance: f64| {
            got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= tolerance * (1.0 + want.abs())
        };
        // A float of 8 bits is a number about the right one, rounded.
        let rounded = |got: f64, want: f64, round: &dyn Fn(f32) -> f32| {
            let error = tolerance * (100.0 + want.abs());
            let [least, most] = [want - error, want + error].map(|end| f64::from(round(end as f32)));
            (least.is_nan() || got >= least) && (most.is_nan() || got <= most)
                || (got.is_nan() && (least.is_nan() || most.is_nan()))
        };
        let out_dtype = self.out_dtype(&problem.out);
        let fits = |got: f64, want: f64| match out_dtype {
            _ if want.is_nan() => true,
            DType::Float8E4M3Fn => rounded(got, want, &|value| Float8E4M3Fn::from_f32(value).to_f32()),
            DType::HiFloat8 => rounded(got, want, &|value| HiFloat8::from_f32(value).to_f32()),
            _ => close(got, want, tolerance),
        };
        let size = self.out_dtype(&problem.out).size().unwrap();
        let mut out_gaps = self.attention_out.to_vec();
        let mut lse_gaps = self.softmax_lse.to_vec();
        let mut element = attention.iter();
        let mut rows = lse.iter();
        let batch = if problem.packed { 1 } else { problem.batch };
        for b in 0..batch {
            for head in 0..problem.heads {
                for row in 0..problem.query_rows {
                    let at = (b, head, row);
                    for d in 0..problem.value_dim {
                        let (got, &want) = (self.output(&problem.out, at, d), element.next().unwrap());
                        if !fits(got, want) {
                            return Err(format!("output {at:?} element {d} is {got}, not {want}"));
                        }
                        let view = &problem.out.view;
                        let index = (view.at(b, head, row) + d as i64 * view.dim) as usize;
                        out_gaps[index * size..][..size].fill(0xff);
                    }
                    let want = *rows.next().unwrap();
                    if let Some(lse) = &problem.lse {
                        let got = self.lse(lse, at);
                        if !close(got, want, 2e-5) {
                            return Err(format!("log-sum-exp {at:?} is {got}, not {want}"));
                        }
                        lse_gaps[lse.view.at(b, head, row) as usize * 4..][..4].fill(0xff);
                    }
                }
            }
        }
        if out_gaps.iter().chain(&lse_gaps).any(|&byte| byte != 0xff) {
            return Err("bytes between the elements of an output changed".into());
        }
        Ok(())
    }
}

fn single(bytes: &[u8], index: usize) -> f64 {
    let bytes: [u8; 4] = bytes[4 * index..][..4].try_into().unwrap();
    f64::from(f32::from_le_bytes(bytes))
}

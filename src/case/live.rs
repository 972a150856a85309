//! Cases of live calls.

use super::{AttentionCase, Tolerance};
use crate::attention::{Inputs, Output, Plan};
use crate::case_file::{expected_output, nans};
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::runtime::Stream;

impl AttentionCase {
    /// Makes a case of a call from the plan's attributes and mask and from these inputs, which are copied from the
    /// device. From a paged cache only the blocks are copied that the call reads; the case's block table numbers them
    /// anew. The case names the device's chip and release, and the version of the operator that the plan calls. Waits
    /// for the stream.
    ///
    /// The case expects no outputs; [`AttentionCase::expecting`] adds them.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a call that no case file can hold: more than 256 MiB, a
    /// strided tensor, an element type that safetensors lacks; [`Error::Acl`]: a copy, or work on the stream,
    /// failed.
    ///
    /// ```
    /// use ascend_attention::attention::{BlockTable, Inputs};
    /// use ascend_attention::case::{AttentionCase, Tolerance, Verdict};
    /// use ascend_attention::{FusedInferAttention, Layout, Runtime, bf16};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "emulation")] {
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let cache = stream.upload(&vec![bf16::ONE; 6 * 16 * 128], [6, 16, 128])?; // 6 blocks of 16 tokens
    /// let query = stream.upload(&vec![bf16::ONE; 128], [1, 1, 128])?;
    /// let table = BlockTable::from_rows(&stream, &[vec![4, 1]], 16)?;
    /// let inputs = Inputs::new(&query, &cache, &cache).paged(&table);
    /// let call = FusedInferAttention::new(Layout::Bsh).scale(1.0 / 128f64.sqrt());
    /// let plan = call.actual_seq_lengths_kv([20]).plan(inputs)?;
    /// let output = plan.launch(&stream, inputs)?;
    ///
    /// let case = AttentionCase::record(&stream, &plan, inputs)?;
    /// assert_eq!(case.arguments.key[0].shape(), [2, 16, 128]); // the two blocks that the call reads
    /// let case = case.expecting(&stream, &output, Tolerance::default())?;
    /// assert_eq!(case.launch(&stream)?.verdict, Verdict::Passed);
    /// case.write(std::env::temp_dir().join("report.safetensors"))?;
    /// # std::fs::remove_file(std::env::temp_dir().join("report.safetensors"))?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn record<'a, T: Element>(stream: &Stream, plan: &Plan, inputs: impl Into<Inputs<'a, T>>) -> Result<Self> {
        stream.synchronize()?;
        let live = plan.live(&inputs.into().tensors());
        let case = live.map_or_else(|| Err("a plan of parts, or one with a cap".to_owned()), |live| live.case());
        let case = case.and_then(|case| case.attention().map_err(|error| error.to_string()));
        case.map_err(|why| {
            Error::invalid(
                "case",
                why,
                "a call that a case file can hold: use `record_calls`, which keeps shapes and attributes of others",
            )
            .fix("record shapes and attributes by `record_calls`")
        })
    }

    /// Returns the case with these outputs as its expected ones. Waits for the stream.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for outputs of an element type that cannot be compared, or
    /// with NaN; otherwise as for [`AnyTensor::download_bytes`](crate::AnyTensor::download_bytes).
    pub fn expecting<T: Element>(mut self, stream: &Stream, output: &Output<T>, tolerance: Tolerance) -> Result<Self> {
        let lse = output.softmax_lse.as_deref();
        let expected = |tensor: &crate::AnyTensor| {
            let bytes = tensor.download_bytes(stream)?;
            let expected = expected_output(tensor.desc(), bytes).ok_or_else(|| {
                Error::invalid(
                    "output",
                    tensor.desc(),
                    "an element type that can be compared: FLOAT, FLOAT16, BF16 or INT8",
                )
                .fix("record the call without this output")
            })?;
            match nans(&expected) {
                0 => Ok(expected),
                count => Err(Error::invalid(
                    "output",
                    format_args!("{count} NaN in {}", tensor.desc()),
                    "numbers: NaN in an expected output says that an element is not specified",
                )
                .fix("compute the expected output anew, or leave it out")),
            }
        };
        self.expected = vec![("attention_out", expected(&output.attention)?)];
        let lse = lse.map(expected).transpose()?;
        self.expected.extend(lse.map(|lse| ("softmax_lse", lse)));
        self.tolerance = Some(tolerance);
        Ok(self)
    }
}

//! Steps as files.

use serde::{Deserialize, Serialize};

use ascend_attention::Violation;

use crate::rules;

use super::BatchSettings;
use super::layer_mask::LayerMask;
use super::metadata::AttentionMetadata;
use super::request::BatchRequest;

/// A step as a file: a production batch that becomes a test. A mask that was set for the step
/// ([`AttentionMetadata::set_mask`]) is recorded where it has a text ([`masked`](Self::masked)); otherwise the step
/// that is read again has the mask of the settings' causality.
///
/// ```
/// use ascend_serving::kv::{BlockPool, PadPolicy};
/// use ascend_serving::{AttentionState, BatchRequest, BatchSettings, Causality, RecordedBatch};
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// let pool = BlockPool::new(8, 128, PadPolicy::SkipNegative)?;
/// let settings = BatchSettings::of(&pool, Causality::Causal);
/// let decode = BatchRequest::in_row(&[4, 2], 130, 1);
/// let json = RecordedBatch::new(settings, &[decode]).to_json();
///
/// let metadata = RecordedBatch::from_json(&json)?.metadata()?;
/// assert_eq!(metadata.state(), AttentionState::DecodeOnly);
/// assert_eq!(metadata.slots(), [2 * 128 + 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedBatch {
    version: u32,
    /// What the requests share.
    pub settings: BatchSettings,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mask: Option<MaskText>,
    requests: Vec<RecordedRequest>,
}

/// A mask by its name and parameters, which are those of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
struct MaskText(String);

impl TryFrom<String> for MaskText {
    type Error = Violation;

    fn try_from(text: String) -> Result<Self, Violation> {
        text.parse::<LayerMask>().map(|_| Self(text))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedRequest {
    cached: usize,
    new: usize,
    drafts: usize,
    row: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prompt_len: Option<usize>,
}

/// The version of a recorded batch, whatever else it holds.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl RecordedBatch {
    /// Version of the format that this crate writes and reads.
    pub const VERSION: u32 = 1;

    /// Copies a batch.
    pub fn new(settings: BatchSettings, requests: &[BatchRequest<'_>]) -> Self {
        let copy = |request: &BatchRequest<'_>| RecordedRequest {
            cached: request.cached,
            new: request.new,
            drafts: request.drafts,
            row: request.row.to_vec(),
            prompt_len: request.prompt_len,
        };
        Self { version: Self::VERSION, settings, mask: None, requests: requests.iter().map(copy).collect() }
    }

    /// Records the mask that was set for the step, by the text that [`LayerMask`] is read from, such as `sinks:4:1024`.
    ///
    /// # Errors
    /// [`MASK_TEXT`](crate::rules::MASK_TEXT) for another text.
    pub fn masked(mut self, text: &str) -> Result<Self, Violation> {
        self.mask = Some(text.to_owned().try_into()?);
        Ok(self)
    }

    /// The mask of the step, where one was recorded. Read it once: each is another mask, with plans and tensors of its
    /// own.
    pub fn mask(&self) -> Option<LayerMask> {
        self.mask.as_ref().and_then(|MaskText(text)| text.parse().ok())
    }

    /// The text of the mask.
    pub(crate) fn mask_text(&self) -> Option<&str> {
        self.mask.as_ref().map(|MaskText(text)| &**text)
    }

    /// The metadata of the step, with its mask.
    ///
    /// # Errors
    /// As for [`AttentionMetadata::new`].
    pub fn metadata(&self) -> Result<AttentionMetadata, Violation> {
        let mut metadata = AttentionMetadata::new(&self.requests(), self.settings)?;
        if let Some(mask) = self.mask() {
            metadata.set_mask(mask);
        }
        Ok(metadata)
    }

    /// The requests.
    pub fn requests<'a>(&'a self) -> Vec<BatchRequest<'a>> {
        let view = |request: &'a RecordedRequest| {
            BatchRequest::in_row(&request.row, request.cached, request.new)
                .drafts(request.drafts)
                .prompt_len(request.prompt_len)
        };
        self.requests.iter().map(view).collect()
    }

    /// The batch as JSON.
    pub fn to_json(&self) -> String {
        // Integers, sequences and names alone: nothing that JSON could refuse.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads a batch from JSON.
    ///
    /// # Errors
    /// [`BATCH_FORMAT`](crate::rules::BATCH_FORMAT) for anything but what [`RecordedBatch::to_json`] writes, such as
    /// settings that no cache has, and a mask that has no such name or parameters.
    /// [`metadata`](Self::metadata) checks the batch itself.
    pub fn from_json(json: &str) -> Result<Self, Violation> {
        let wrong = |given: String| {
            rules::BATCH_FORMAT.broken(given, format_args!("a recorded batch of version {}", Self::VERSION))
        };
        // The version first: another one may have other names.
        let version = serde_json::from_str(json).map(|Version { version }| version);
        match version {
            Ok(version) if version != Self::VERSION => Err(wrong(format!("version {version}"))),
            _ => serde_json::from_str(json).map_err(|error| wrong(error.to_string())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::example::request;
    use super::super::{Causality, StatePolicy};
    use super::*;
    use crate::kv::PadPolicy;

    #[test]
    fn other_json_is_refused() {
        let good = {
            let settings = BatchSettings {
                blocks: 64,
                block_size: 4,
                pad: PadPolicy::SkipNegative,
                causality: Causality::Causal,
                policy: StatePolicy::default(),
            };
            RecordedBatch::new(settings, &[request(5, 1, &[3, 9])]).to_json()
        };
        for bad in [
            String::new(),
            "{}".to_owned(),
            good.replace("\"version\":1", "\"version\":2"),
            good.replace("\"blocks\":64", "\"blocks\":0"),
            good.replace("\"blocks\":64", "\"blocks\":536870912"),
            good.replace("\"block_size\":4", "\"block_size\":0"),
            good.replace("\"SkipNegative\"", "{\"DumpSlot\":256}"),
            good.replace("\"cached\":5", "\"cached\":-5"),
            good.replace("\"cached\":5", "\"cached\":5,\"other\":1"),
            good.replace("\"requests\"", "\"mask\":\"sinks:4\",\"requests\""),
        ] {
            let error = RecordedBatch::from_json(&bad).unwrap_err();
            assert_eq!(error.rule, &rules::BATCH_FORMAT, "{bad}");
        }
        // One of another version is named by it, whatever else it holds.
        let error = RecordedBatch::from_json("{\"version\":2,\"pages\":4}").unwrap_err();
        assert_eq!(error.given, "version 2");
        assert!(good.contains("\"causality\":\"Causal\"") && !good.contains("mask"));

        // A mask is read again by its text.
        let plain = RecordedBatch::from_json(&good).unwrap();
        assert_eq!(plain.metadata().unwrap().mask(), &Causality::Causal.into());
        assert_eq!(plain.clone().masked("sinks").unwrap_err().rule, &rules::MASK_TEXT);
        let masked = plain.clone().masked("sinks:4:1024").unwrap();
        let json = masked.to_json();
        assert!(json.contains("\"mask\":\"sinks:4:1024\""), "{json}");
        let again = RecordedBatch::from_json(&json).unwrap();
        assert_eq!((&again, again == plain), (&masked, false));
        let metadata = again.metadata().unwrap();
        assert_eq!(metadata.mask().named().map(|mask| mask.name()), Some("sinks:4:1024"));
        let window = plain.masked("window:3").unwrap().metadata().unwrap();
        assert_eq!(window.mask(), &Causality::from_flags(true, Some(3)).unwrap().into());
    }
}

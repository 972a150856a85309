//! Published layers and sizes, by model, for leaving out the middle of the causal triangle.

use ascend_attention::spec::geometry::TriangleMix;

use crate::layers::TriangleLayers;

/// Where the numbers of a [`TrianglePreset`] come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PresetSource {
    /// The paper, arXiv 2507.21526: layers found by gradients, accuracy measured.
    Paper,
    /// Unpublished notes on Qwen3. They go from the bottom, where the paper goes from the top, and give no measurement.
    Guide,
    /// A port to the 910B3, which publishes times but no accuracy.
    Port,
}

/// The layers and sizes that a [`PresetSource`] names for a model.
///
/// No source names layers of other models: they are measured with [`TriangleProbe`](crate::TriangleProbe), and
/// until then all of them stay dense. A depth that is right for one model says little about the next: half of the
/// layers in one of the paper's models, under a third in the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrianglePreset {
    /// Name of the model.
    pub model: &'static str,
    /// Number of its layers, where the source has it.
    pub layers: Option<usize>,
    /// First and last layer of each run of layers that leave out the middle.
    leave_out: &'static [(usize, usize)],
    /// Sizes, where the source has them.
    pub sizes: Option<TriangleMix>,
    /// Where the numbers come from.
    pub source: PresetSource,
}

impl TrianglePreset {
    /// Llama 3.1 8B in the paper.
    pub const LLAMA_3_1_8B: Self = Self {
        model: "Llama-3.1-8B",
        layers: Some(32),
        leave_out: &[(16, 31)],
        sizes: Some(TriangleMix::PAPER),
        source: PresetSource::Paper,
    };
    /// Llama 3 8B 262K in the paper.
    pub const LLAMA_3_8B_262K: Self = Self { model: "Llama-3-8B-262K", ..Self::LLAMA_3_1_8B };
    /// Qwen2.5 7B in the paper.
    pub const QWEN_2_5_7B: Self =
        Self { model: "Qwen2.5-7B", layers: Some(28), leave_out: &[(20, 27)], ..Self::LLAMA_3_1_8B };
    /// Qwen3 8B in the port to the 910B3.
    pub const QWEN_3_8B: Self = Self {
        model: "Qwen3-8B",
        layers: Some(36),
        leave_out: &[(5, 5), (7, 7), (10, 10), (15, 35)],
        sizes: None,
        source: PresetSource::Port,
    };
    /// Qwen3 14B in [`PresetSource::Guide`].
    pub const QWEN_3_14B: Self = Self {
        model: "Qwen3-14B",
        layers: None,
        leave_out: &[(0, 11)],
        sizes: Some(TriangleMix::GUIDE),
        source: PresetSource::Guide,
    };
    /// Qwen3 32B in [`PresetSource::Guide`].
    pub const QWEN_3_32B: Self = Self { model: "Qwen3-32B", leave_out: &[(0, 15)], ..Self::QWEN_3_14B };

    /// Every preset.
    pub const ALL: [Self; 6] = [
        Self::LLAMA_3_1_8B,
        Self::LLAMA_3_8B_262K,
        Self::QWEN_2_5_7B,
        Self::QWEN_3_8B,
        Self::QWEN_3_14B,
        Self::QWEN_3_32B,
    ];

    /// The preset of a model, whatever the case of its name; `None` if nothing is published about it.
    pub fn of_model(model: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|preset| preset.model.eq_ignore_ascii_case(model))
    }

    /// The layers that leave out the middle.
    pub fn triangle_layers(&self) -> TriangleLayers {
        TriangleLayers::of_runs(self.leave_out)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn presets_are_what_their_sources_say() {
        let preset_of = |model| {
            let preset = TrianglePreset::of_model(model).unwrap();
            (preset.triangle_layers().to_string(), preset.source)
        };
        let said = |layers: &str, source| (layers.to_owned(), source);
        assert_eq!(preset_of("llama-3.1-8b"), said("16-31", PresetSource::Paper));
        assert_eq!(preset_of("Llama-3-8B-262K"), said("16-31", PresetSource::Paper));
        assert_eq!(preset_of("Qwen2.5-7B"), said("20-27", PresetSource::Paper));
        assert_eq!(preset_of("Qwen3-8B"), said("5, 7, 10, 15-35", PresetSource::Port));
        assert_eq!(preset_of("Qwen3-14B"), said("0-11", PresetSource::Guide));
        assert_eq!(preset_of("Qwen3-32B"), said("0-15", PresetSource::Guide));
        assert_eq!(TrianglePreset::of_model("Qwen3-4B"), None);
        let guide = |count| TriangleLayers::first(count).unwrap().to_string();
        assert_eq!(guide(TriangleLayers::GUIDE_COUNT_LONG_CONTEXT), "0-15");
        assert_eq!(TriangleLayers::GUIDE_COUNT_7B.map(guide).collect::<Vec<_>>(), ["0-5", "0-6", "0-7"]);
        assert_eq!(TriangleMix::GUIDE, TriangleMix::new(4, 32, 64));
        assert_eq!(TriangleMix::GUIDE_LONG_CONTEXT, TriangleMix::new(8, 64, 128));
    }

    #[test]
    fn layers_of_presets_are_layers_of_their_models() {
        for preset in TrianglePreset::ALL {
            let layers = preset.triangle_layers();
            let last = layers.indices().last().unwrap();
            assert!(preset.layers.is_none_or(|count| *last < count));
            let name = TrianglePreset::of_model(preset.model);
            assert_eq!(name, Some(preset), "names are unique");
        }
    }
}

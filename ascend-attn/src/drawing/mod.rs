//! Pictures as files.

mod png_file;
mod scene;
mod svg_file;

use std::path::Path;

use ascend_attention::case;

use crate::Stop;
pub(crate) use scene::{Anchor, Box, Colour, Scene, Size, Text};

/// Writes a picture as PNG and as SVG, where there are files for them.
pub(crate) fn write(scene: &Scene, [png, svg]: [Option<&Path>; 2]) -> Result<(), Stop> {
    let write =
        |file: &Path, bytes: &[u8]| case::write_file(file, bytes).map_err(|error| Stop::Trouble(error.to_string()));
    if let Some(file) = svg {
        write(file, svg_file::text(scene).as_bytes())?;
    }
    if let Some(file) = png {
        let bytes = png_file::bytes(scene);
        write(file, &bytes.map_err(|error| Stop::Trouble(format!("{}: {error}", file.display())))?)?;
    }
    Ok(())
}

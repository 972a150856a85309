//! Text from files that the command line names.

use std::path::Path;

use ascend_attention::case;

/// The text of a regular file of at most `most` bytes, or an error message.
pub(super) fn read(file: &Path, most: u64) -> Result<String, String> {
    let bytes = case::read_file(file, most).map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| format!("{}: {error}", file.display()))
}

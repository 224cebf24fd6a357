from tests.data.conftest import cache_folder as cache_folder

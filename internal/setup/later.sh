# shellcheck shell=sh
# Sets later to the tests that test.sh leaves to check.sh, for go test's -skip: those that build everything again,
# mostly run other languages' programs or a browser, wait for ten
# seconds several times, or repeat one thing: a kill at each step, each kind of planted file, each limit, hundreds of
# processes.
later='ServeSoak|HostileCells|Languages|PythonClients|NodeClient|Examples|Page|PagesOfOtherSites|Builds|Library|Install|MalformedScripts'
later="$later|Soak|KilledInPhases|KilledAtSystemCalls|BwrapFake|BwrapSilent|BwrapRelay|ApplyKilled|SnapshotKilled|Races"
later="$later|StatePlanted|StatePlantedAbove|StateGarbageRecord|StateGarbageFiles|DiskFull"
later="$later|Faults|MCPOutput|PackageManagers|Shells|RecordTruncated|NoTaskLeftAtKill|NoTaskOfUserLeft|ForkBomb"
later="$later|Cookbook|OutsideHoldsExec|OutsideHoldsRun|ReaderBlocked|ReaderOfMessagesBlocked"
later="$later|FewDescriptors|SmallLimits|NoTaskLeftAtStart|BigTeardown|ManyEntries|ExecVeryShortTimeout|DeadlineAtTheEnd"
later="^Test($later)\$"
# Sets longest to those of them that check.sh leaves to nightly.sh, and anyone to the tests that check.sh runs only as
# the current user, because they do not depend on the user.
longest='ManyEntries'
anyone='Cookbook|Builds|Library|LibraryTypes|Docs|DocLinks|BackendPython|PythonClients|NodeClient|AsyncioCancelled|PythonMistakes|NodeAborted|NodeConnects'
anyone="$anyone|ClientTypes|ClientTypesChecked|Examples|Page|PageFailures|PagesOfOtherSites|MCPDocs|Languages|Shells|PackageManagers"
# Sets rare to the other tests whose number of tries depends on SBXRUN_SOAK: test.sh runs them with few tries, and
# check.sh again with many.
rare='CurrentDirectoryExchanged|ImagePullKilled|MountRace|ExecSoak|KillsItself|VolumeKilled|CleanupWhileStarting'
rare="$rare|ExecWhileKilled|SandboxStruck|QuitCalls|KilledRandomly|KilledRandomlyTerminal|StoppedEarly|ThreadChurn|StartClientKilled"
rare="$rare|Together|UnprovenGoes|Slow|MCPKilled"
rare="^Test($rare)\$"

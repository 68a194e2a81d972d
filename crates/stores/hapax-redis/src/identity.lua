-- Returns the identity of the store: a random text of 32 characters, followed by '+' once an operator
-- has confirmed it. It is lost with the records when the server is emptied.
--
-- KEYS[1]  name of the identity
-- ARGV[1]  identity to store if there is none; may be empty
-- ARGV[2]  1 to confirm the stored identity
--
-- Returns an empty text if there is none.
local found = redis.pcall('GET', KEYS[1])
if type(found) == 'table' then
  return redis.error_reply('HAPAX ' .. found.err)
end
local wanted = found or ARGV[1]
if ARGV[2] == '1' and wanted ~= '' then
  wanted = string.sub(wanted, 1, 32) .. '+'
end
if wanted == '' or wanted == found then
  return wanted
end
local done = redis.pcall('SET', KEYS[1], wanted)
if done.err then
  return redis.error_reply('NOTWRITTEN ' .. done.err)
end
return wanted
